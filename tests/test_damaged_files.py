"""Files that were damaged, by accident or on purpose: refused in one sentence, with little memory, or read as they are.

A small share of what tests/torture tries.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parent / "torture"))

import artefacts
import checkpoints

import artefact_bytes
from dapcal import blocks, container, models
from previous_cases import FOLDER


def test_damaged_artefacts_are_refused_in_one_sentence():
    tally = artefacts.run(150, seed=20, further=False)
    assert tally.tried == 150
    assert not tally.failed, "\n".join(tally.failed)


def test_damaged_checkpoints_are_refused_or_lead_to_the_same_result(monkeypatch):
    ended = []
    judged = artefacts._judged
    monkeypatch.setattr(artefacts, "_judged", lambda raised, *rest: ended.append(raised) or judged(raised, *rest))
    tally = checkpoints.run(30, seed=4)
    assert tally.tried == 30
    assert not tally.failed, "\n".join(tally.failed)
    assert sum(isinstance(error, ValueError) for error in ended) > 20  # so that the damage was there to see


@pytest.mark.parametrize("widths", [[20_000, 20_000], [2**40, 2**40], [10**30]])
def test_a_small_file_does_not_ask_for_a_large_network(widths, tmp_path):
    """34 kB that describe a network of 1.6 GB."""
    description, tensors = artefact_bytes.opened((FOLDER / "table-regression.dap").read_bytes())
    description["about"]["recipe"]["hidden"] = widths
    path = tmp_path / "model.dap"
    path.write_bytes(artefact_bytes.sealed(description, tensors))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"recipe describes a network of .* parameters and it holds .* save it again"):
        models.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def head_of(path: Path) -> tuple[dict, int]:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), 8 + length


def test_large_tensors_have_a_checksum_for_every_block(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 1000)
    path = tmp_path / "a.dap"
    tensors = {
        "one": torch.arange(3001, dtype=torch.int8), "large": torch.randn(50, 30), "wide": torch.randn(3).double(),
        "none": torch.empty(0, 4), "flag": torch.tensor(True), "half": torch.ones(3, dtype=torch.bfloat16),
    }  # fmt: skip
    with path.open("wb") as file:
        container.write(file, "a text", tensors)
    header, start = head_of(path)
    written = json.loads(header["__metadata__"]["blocks"])
    assert {name: len(sums) for name, sums in written.items()} == {
        "one": 4, "large": 6, "wide": 1, "none": 0, "flag": 1, "half": 1,
    }  # fmt: skip
    assert start % 4096 == 0  # of a file with more than one block
    assert all((start + header[n]["data_offsets"][0]) % t.element_size() == 0 for n, t in tensors.items())
    found = container.read(path)
    found.check()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    with safe_open(path, "pt") as opened:  # and others read it too
        assert torch.equal(opened.get_tensor("large"), tensors["large"])
    content = bytearray(path.read_bytes())
    content[start + header["large"]["data_offsets"][0] + 4500] ^= 1
    path.write_bytes(content)
    with pytest.raises(container.Changed, match="'large'"):
        container.read(path).check()
