"""Arrays, images, weights and tables that are not what they should be: one sentence, exit code 2, nothing overwritten.

A small share of what tests/torture tries, and the faults that it found.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent / "torture"))

import files

from dapcal import npz
from dapcal.cli import app
from dapcal.models import arrays, factories, network_fitting
from dapcal.models.image_folders import Decoder
from dapcal.models.tokens import vocabulary
from previous_cases import FOLDER, smooth


def test_damaged_files_end_in_a_sentence_and_overwrite_nothing(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(files.__file__).parent))
    tally = files.run(25, seed=11)
    assert tally.tried == 25
    assert not tally.failed, "\n".join(tally.failed)


def with_head(path: Path, shape: str, descr: str = "<f4", data: bytes = bytes(64)) -> None:
    """An npz file whose array `x` says of itself what it is told to."""
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + data)


@pytest.mark.parametrize(
    "shape", ["(4294967296, 4294967296)", "(18446744073709551616, 2)", "(9, 2)", "(-8, 2)", "(7, 2)"]
)
@pytest.mark.parametrize("command", ["network", "table"])
def test_an_impossible_shape_of_an_array(shape, command, tmp_path, monkeypatch):
    """2³² × 2³² numbers wrapped around to none, and became zeros of that shape; 2⁶⁴ overflowed."""
    monkeypatch.chdir(tmp_path)
    with_head(tmp_path / "new.npz", shape)
    Path("out.csv").write_text("before")
    words = ["predict", FOLDER / "network.dap", "new.npz", "--model", "previous_cases:smooth", "-o", "out.csv"]
    if command == "table":
        words = ["predict", FOLDER / "table-regression.dap", "new.npz", "-o", "out.csv"]
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 2, result.output
    assert "array `x` is said to be" in result.output
    assert "and holds 64 bytes" in result.output
    assert Path("out.csv").read_text() == "before"


def test_a_true_shape_is_read(tmp_path):
    with_head(tmp_path / "a.npz", "(8, 2)")
    assert npz.array(tmp_path / "a.npz", "x").read().shape == (8, 2)


class Tokens(nn.Module):
    """Ids with two embeddings, of tokens and of places, and one of types that are always 0."""

    def __init__(self) -> None:
        super().__init__()
        self.types, self.tokens, self.places = nn.Embedding(2, 4), nn.Embedding(10, 4), nn.Embedding(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        entered = self.tokens(x) + self.places(torch.arange(x.shape[1])) + self.types(torch.zeros_like(x))
        return self.last(entered.mean(1))


def test_the_embedding_that_inputs_go_into_says_which_ids_there_are():
    assert vocabulary(Tokens(), torch.tensor([[1, 2, 3]])) == 10
    assert vocabulary(nn.Linear(2, 2), torch.tensor([[1, 2]])) is None


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    x = torch.randint(10, (80, 3))
    data = [arrays.Labelled(x[half], (x[half].sum(1) > 13).long()) for half in (slice(0, 40), slice(40, None))]
    path = tmp_path_factory.mktemp("tokens") / "tokens.dap"
    network_fitting.fit([Tokens()], *data, factory="test_damaged_inputs:Tokens").save(path)
    return path


@pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")
@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([[1, 2, 3], [4, 10, 5]], "Expected token ids from 0 to 9 in `x`, .* got 10 in row 1; prepare"),
        ([[1, 2, 3], [4, -1, 5]], "Expected token ids from 0 to 9 in `x`, .* got -1 in row 1"),
        ([[1.0, 2.5, 3.0]], "Expected token ids in `x` as whole numbers, .* got float64"),
    ],
)
def test_token_ids_that_the_network_does_not_have(ids, words, tokens, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("new.npz", x=np.array(ids))
    Path("out.csv").write_text("before")
    command = ["predict", str(tokens), "new.npz", "--model", "test_damaged_inputs:Tokens", "-o", "out.csv"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2, result.output
    assert re.search(words, result.output)
    assert Path("out.csv").read_text() == "before"


def test_token_ids_in_training_data():
    x = torch.randint(10, (20, 3))
    wrong = x.clone()
    wrong[7, 1] = 99
    good, bad = (arrays.Labelled(ids, torch.arange(20) % 2) for ids in (x, wrong))
    for train, held_out, name in ((bad, good, "train"), (good, bad, "held_out")):
        with pytest.raises(ValueError, match=f"token ids from 0 to 9 in `{name}`.*99 in row 7"):
            network_fitting.fit([Tokens()], train, held_out)


STATE = smooth().state_dict()
WEIGHTS = {
    "sparse": ({n: t.to_sparse() for n, t in STATE.items()}, "plain tensors by name.*sparse"),
    "complex": ({n: t.to(torch.complex64) for n, t in STATE.items()}, "plain tensors by name.*complex"),
    "without data": ({n: t.to("meta") for n, t in STATE.items()}, "plain tensors by name"),
    "names that are numbers": ({3: torch.zeros(1)}, "plain tensors by name"),
    "whole numbers": ({n: t.long() for n, t in STATE.items()}, "holds torch.int64 for `0.weight`.*torch.float32"),
    "too large": ({n: t.double() * 1e300 for n, t in STATE.items()}, "too large for the model's type"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_a_network_cannot_take(case, tmp_path):
    state, words = WEIGHTS[case]
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=words):
        factories.with_weights(smooth(), tmp_path / "w.pt")


def test_weights_with_a_byte_turned_over(tmp_path, monkeypatch):
    """torch's reader then pops from an empty list."""

    def fails(*_: object, **__: object) -> None:
        raise IndexError("pop from empty list")

    (tmp_path / "w.pt").write_bytes(b"PK")
    monkeypatch.setattr(torch, "load", fails)
    with pytest.raises(ValueError, match=r"w\.pt is damaged .*IndexError.*save it again"):
        factories.with_weights(smooth(), tmp_path / "w.pt")


def test_an_image_of_a_hundred_million_pixels_is_not_decoded(tmp_path):
    (tmp_path / "a.png").write_bytes(files.huge_png(10_000))
    with pytest.raises(ValueError, match=r"a\.png is damaged or no image \(Image size"):
        Decoder((1, 4, 4), resize=True)(tmp_path / "a.png")
