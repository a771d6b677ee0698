"""Large tensors stay in their file: the same predictions, nothing read before it is used, nothing used unchecked."""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import artefact_bytes
import dapcal
import dapcal.serve
import previous_cases
from dapcal import artifact, blocks, container, models, trying
from dapcal.adjust import Inflate
from dapcal.cli import app
from dapcal.distances import IVF, Coreset, Space, TorchIndex, hausdorff, mmd, nearest
from dapcal.distances.projectors import Identity
from dapcal.in_file import BlockDamaged, InFile
from dapcal.serve.app import _is_refusal
from forks import forked
from test_artifact import IDENTITY, X, assert_same, calibrate, diagonal, network, plain

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")

BLOCK = 128  # bytes: the 40 training points (2 numbers each) are three blocks
POINTS = "calibrated.distance.spaces.0.metric.index.points"
ROWS = torch.arange(96, dtype=torch.float32).reshape(24, 4)  # eight rows in a block


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Everything that may stay in its file does, in blocks of a few rows; two rows are tried at loading."""
    monkeypatch.setattr(container, "LARGE", 1)
    monkeypatch.setattr(blocks, "BLOCK", BLOCK)
    monkeypatch.setattr(trying, "_ROWS", 2)


@pytest.fixture
def hashed(monkeypatch) -> Counter[bytes]:
    """How often each content was hashed since the last `clear`."""
    found: Counter[bytes] = Counter()
    honest = blocks.checksum
    monkeypatch.setattr(blocks, "checksum", lambda block: found.update([bytes(block)]) or honest(block))
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.dap"


def attached(path: Path, rows: Tensor) -> Tensor:
    """Some rows that were saved and opened again."""
    artifact.save(plain(IDENTITY), path, attachments={"rows": rows})
    return artifact.open(path).attachments["rows"]


def place_of(path: Path, name: str) -> int:
    """Where a tensor begins."""
    header, data = artefact_bytes.header_and_data(path.read_bytes())
    return path.stat().st_size - len(data) + header[name]["data_offsets"][0]


def turned_over(path: Path, place: int) -> None:
    """One bit changed in place."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


# The same predictions


METRICS = {
    "nearest": nearest, "third": functools.partial(nearest, k=3), "all": functools.partial(nearest, k=40),
    "Hausdorff": hausdorff, "MMD": mmd, "coreset": functools.partial(nearest, index=Coreset(20)),
    "lists": functools.partial(nearest, index=IVF(lists=4, probes=1)),
}  # fmt: skip


@pytest.mark.parametrize("metric", METRICS)
def test_what_stays_in_the_file_predicts_the_same(metric, path, tmp_path):
    calibrated = calibrate(diagonal(), Inflate(drawn=True), Space(Identity(), METRICS[metric]))
    calibrated.save(path)
    loaded = dapcal.load(path, network(seed=99))
    assert any(isinstance(tensor, InFile) for tensor in artifact.open(path).tensors.values())
    assert_same(loaded(X), calibrated(X))
    assert_same(loaded.joint(X), calibrated.joint(X))
    for same in (copy.deepcopy(loaded), loaded.to("cpu"), dapcal.load(path, network())):
        assert_same(same(X), calibrated(X))
    loaded.save(tmp_path / "again.dap")
    assert (tmp_path / "again.dap").read_bytes() == path.read_bytes()


def test_an_exported_module_has_numbers_of_its_own(path):
    plain(IDENTITY).save(path)
    module = dapcal.load(path, network()).module()
    assert not any(isinstance(tensor, InFile) for tensor in module.state_dict().values())
    one, two = module(X), plain(IDENTITY).module()(X)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_small_tensors_and_those_of_the_network_are_read(path, monkeypatch):
    plain(IDENTITY).save(path)
    loaded = dapcal.load(path, network())
    assert type(loaded.posterior.draws) is type(loaded.evidence.held_out) is Tensor
    monkeypatch.setattr(container, "LARGE", 40 * 2 * 4 + 1)
    assert type(dapcal.load(path, network()).distance.spaces[0].metric.index.points) is Tensor


# Nothing is read before it is used


def test_loading_hashes_the_first_rows_alone_and_a_prediction_all_of_them_once(path, hashed):
    calibrated = plain(IDENTITY)
    artifact.save(calibrated, path, attachments={"rows": ROWS})
    points = calibrated.distance.spaces[0].metric.index.points
    own, rows = ([bytes(block) for block in blocks.blocks(t)] for t in (points, ROWS))
    hashed.clear()
    loaded = dapcal.load(path, network())
    assert [hashed[block] for block in own] == [1, 0, 0]
    assert [hashed[block] for block in rows] == [0, 0, 0]
    loaded(X)
    loaded(X)
    assert [hashed[block] for block in own] == [1, 1, 1]
    assert [hashed[block] for block in rows] == [0, 0, 0]


def test_of_lists_those_alone_are_read_that_are_searched(path, hashed):
    calibrated = calibrate(
        diagonal(), Inflate(), Space(Identity(), functools.partial(nearest, index=IVF(lists=4, probes=1)))
    )
    calibrated.save(path)
    points = calibrated.distance.spaces[0].metric.index.points
    own = [bytes(block) for block in blocks.blocks(points)]
    hashed.clear()
    loaded = dapcal.load(path, network())
    assert 0 < sum(hashed[block] for block in own) < 3
    assert_same(loaded(points[torch.arange(0, 40, 4)] + 9), calibrated(points[torch.arange(0, 40, 4)] + 9))
    loaded(points)
    assert [hashed[block] for block in own] == [1, 1, 1]


def test_threads_that_come_together_hash_a_block_once(path, hashed):
    rows = attached(path, ROWS)
    start, sums = threading.Barrier(8), []

    def work() -> None:
        start.wait()
        sums.append(float(rows.sum()))

    hashed.clear()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [float(ROWS.sum())] * 8
    assert sorted(hashed.values()) == [1, 1, 1]


ASKED: dict[str, tuple[Callable[[Tensor], object], list[int]]] = {
    "shape, type and place": (lambda t: (t.shape, len(t), t.dtype, t.device, t.ndim, t.numel(), t.nbytes), []),
    "words": (repr, []),
    "the same type": (lambda t: t.to("cpu", torch.float32).detach()[:1].shape, []),
    "like it": (lambda t: torch.ones(3, dtype=torch.float64).to(t), []),
    "a copy": (copy.deepcopy, []),
    "parts": (lambda t: [part.shape for part in t.split(5)], []),
    "the first rows": (lambda t: t[:8] + 1, [0]),
    "rows across": (lambda t: t[7:9] + 1, [0, 1]),
    "one row": (lambda t: t[9], [1]),
    "the last row": (lambda t: t[-1], [2]),
    "rows by number": (lambda t: t[torch.tensor([[1, 2], [-1, -2]])], [0, 2]),
    "rows of rows": (lambda t: t[8:][torch.tensor([0])], [1]),
    "a part": (lambda t: t.split(8)[2].sum(), [2]),
    "another type": (lambda t: t.double(), [0, 1, 2]),
    "a column": (lambda t: t[:, 0], [0, 1, 2]),
    "every other row": (lambda t: t[::2], [0, 1, 2]),
    "numpy": (lambda t: t.numpy(), [0, 1, 2]),
    "a list": (lambda t: torch.cat([torch.ones(1, 4), t]), [0, 1, 2]),
    "columns apart": (lambda t: t.split(2, 1), [0, 1, 2]),
    "a pickle": (lambda t: pickle.loads(pickle.dumps(t)), [0, 1, 2]),
    "by a transform": (lambda t: torch.func.vmap(lambda row: (t - row).sum())(torch.ones(2, 4)), [0, 1, 2]),
}  # fmt: skip


@pytest.mark.parametrize("what", ASKED)
def test_what_is_asked_for_decides_which_blocks_are_checked(what, path, hashed):
    ask, expected = ASKED[what]
    rows = attached(path, ROWS)
    hashed.clear()
    found = ask(rows)
    assert hashed == Counter([bytes(block) for number, block in enumerate(blocks.blocks(ROWS)) if number in expected])
    if isinstance(found, Tensor) and not isinstance(found, InFile):
        assert torch.equal(found, ask(ROWS))


def test_what_goes_round_python_finds_no_memory_and_is_checked(path, hashed):
    rows = attached(path, ROWS)
    hashed.clear()
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(rows * 2, ROWS * 2)
        assert rows.data_ptr() == 0
    assert sum(hashed.values()) == 3


def test_a_row_wider_than_a_block_is_checked_under_all_of_it(path, hashed):
    wide = torch.arange(240, dtype=torch.float32).reshape(3, 80)  # two and a half blocks a row
    rows = attached(path, wide)
    hashed.clear()
    assert torch.equal(rows[torch.tensor([1])], wide[1:2])
    assert hashed == Counter([bytes(block) for block in list(blocks.blocks(wide))[2:5]])


def memory() -> dict[str, int]:
    """Bytes of this process: its own, of files, and those of files that others have mapped too."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    found = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines}
    of_files = found["Rss"] - found["Anonymous"]
    return {"own": found["Anonymous"], "of files": of_files, "shared": found["Shared_Clean"]}


def grown(before: dict[str, int]) -> dict[str, int]:
    return {what: now - before[what] for what, now in memory().items()}


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is not told here")
def test_an_index_is_not_copied_and_its_pages_are_those_of_other_processes(path, monkeypatch):
    monkeypatch.undo()
    size = 64 << 20
    points = torch.randn(size // 256, 64, generator=torch.Generator().manual_seed(0))
    query = points[5:6].clone()
    artifact.save(plain(IDENTITY), path, attachments={"points": points})
    del points
    indices = []

    def search() -> None:
        before = memory()
        stored = artifact.open(path)
        opened = grown(before)
        indices.append(TorchIndex(stored.attachments["points"], memory=1 << 24))
        assert indices[-1].query(query)[1].item() == 5
        print(json.dumps([opened, grown(before)]))

    search()  # so that the pages are in use, and what is taken once is taken
    with forked(search) as other:
        assert other.ended() == 0, other.stderr.read()
        opened, searched = json.loads(other.stdout.read())
    assert opened["own"] < size / 50
    assert opened["of files"] < size / 2  # not even read: a fork looks at libraries anew
    assert searched["own"] < size / 5
    assert searched["shared"] > 0.9 * size


# Nothing is used unchecked


@pytest.mark.parametrize("block", [1, 2])
def test_a_damaged_block_is_named_when_it_is_touched_and_never_predicts(block, path, tmp_path):
    plain(IDENTITY).save(path)
    turned_over(path, place_of(path, POINTS) + block * BLOCK + 5)
    loaded = dapcal.load(path, network())
    words = rf"model\.dap was changed after .*block {block + 1} of 3 of '{POINTS}'.*save it again"
    for ask in (loaded, loaded, loaded.joint, loaded.predict, copy.deepcopy(loaded), loaded.to("cpu")):
        with pytest.raises(BlockDamaged, match=words):
            ask(X)
    with pytest.raises(BlockDamaged, match=words):
        loaded.module()
    with pytest.raises(BlockDamaged, match=words):
        artifact.open(path).check()
    path_again = tmp_path / "again.dap"
    with pytest.raises(BlockDamaged, match=words):
        loaded.save(path_again)
    assert not path_again.exists()
    points = loaded.distance.spaces[0].metric.index.points
    assert torch.equal(points[:16] + 0, plain(IDENTITY).distance.spaces[0].metric.index.points[:16])


@pytest.mark.parametrize("name", ["calibrated.posterior.draws", "calibrated.evidence.held_out", "calibrated.example"])
def test_damage_elsewhere_is_refused_at_loading(name, path):
    plain(IDENTITY).save(path)
    turned_over(path, place_of(path, name))
    with pytest.raises(ValueError, match=rf"model\.dap was changed.*{name}.*save it again"):
        dapcal.load(path, network())


def test_damage_in_the_first_rows_is_refused_at_loading(path):
    plain(IDENTITY).save(path)
    turned_over(path, place_of(path, POINTS))
    with pytest.raises(BlockDamaged, match="block 1 of 3"):
        dapcal.load(path, network())


def test_a_checksum_that_was_changed_is_refused_at_loading(path):
    plain(IDENTITY).save(path)
    header, data = artefact_bytes.header_and_data(path.read_bytes())
    written = json.loads(header["__metadata__"]["blocks"])
    written[POINTS][2] = written[POINTS][1]
    header["__metadata__"]["blocks"] = json.dumps(written)
    path.write_bytes(artefact_bytes.with_header(header, data))
    with pytest.raises(ValueError, match="its checksum does not match"):
        dapcal.load(path, network())


def with_tensor(path: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """The file with another tensor and right checksums."""
    description, tensors = artefact_bytes.opened(path.read_bytes())
    tensors[name] = change(tensors[name])
    path.write_bytes(artefact_bytes.sealed(description, tensors))


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_refused_when_they_are_used(number, path):
    plain(IDENTITY).save(path)
    with_tensor(path, POINTS, lambda t: t.index_fill(0, torch.tensor([20]), number))
    loaded = dapcal.load(path, network())
    with pytest.raises(BlockDamaged, match=r"model\.dap holds NaN or inf in block 2 of 3 .*calibrate again"):
        loaded(X)


def test_a_truth_value_that_is_none_is_refused_when_it_is_used(path):
    odd = torch.zeros(200, dtype=torch.uint8)
    odd[150] = 2
    rows = attached(path, odd.view(torch.bool))
    assert not rows[:100].any()
    with pytest.raises(BlockDamaged, match=r"neither 0 nor 1, in block 2 of 2 of 'further\.rows'"):
        rows.any()


def test_large_finite_numbers_whose_sum_is_not_are_fine(path):
    rows = attached(path, torch.full((40, 4), 3e38))
    assert rows.amax() == 3e38


def test_points_that_are_named_as_something_else_are_checked_at_loading(path):
    """A file whose tree says that its example are the points, which may stay in the file."""
    plain(IDENTITY).save(path)
    description, tensors = artefact_bytes.opened(path.read_bytes())
    description["tree"]["fields"]["example"] = {"tensor": POINTS}
    path.write_bytes(artefact_bytes.sealed(description, tensors))
    turned_over(path, place_of(path, POINTS) + 2 * BLOCK)
    with pytest.raises(BlockDamaged, match="block 3 of 3"):
        dapcal.load(path, network())


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:, :1],
        lambda t: t[:0],
        lambda t: t.flatten(),
        lambda t: t[None],
        lambda t: t.long(),
        lambda t: t.new_zeros(()),
    ],
)
def test_points_that_do_not_fit_are_refused_at_loading(change, path):
    plain(IDENTITY).save(path)
    with_tensor(path, POINTS, change)
    with pytest.raises(ValueError, match=r"model\.dap .*; save it again"):
        dapcal.load(path, network())


def test_more_neighbours_than_points_are_refused_at_loading(path):
    plain(IDENTITY).save(path)
    description, tensors = artefact_bytes.opened(path.read_bytes())
    description["tree"]["fields"]["distance"]["fields"]["spaces"]["tuple"][0]["fields"]["metric"]["fields"]["k"] = 41
    path.write_bytes(artefact_bytes.sealed(description, tensors))
    with pytest.raises(ValueError, match=r"does not fit together.*between 1 and 40"):
        dapcal.load(path, network())


# Files that change while they are in use


def test_a_file_that_is_replaced_or_removed_lives_on_for_who_has_loaded_it(path):
    calibrated = plain(IDENTITY)
    calibrated.save(path)
    loaded = dapcal.load(path, network())
    calibrate(diagonal(), Inflate(), Space(Identity(), radius=0.5)).save(path)
    assert_same(loaded(X), calibrated(X))
    path.unlink()
    assert_same(loaded(X), calibrated(X))
    assert_same(dapcal.load(saved_by(loaded, path), network())(X), calibrated(X))


def saved_by(loaded: dapcal.Calibrated, path: Path) -> Path:
    loaded.save(path)
    return path


def test_a_file_that_is_cut_in_place_is_told_before_it_is_read(path):
    plain(IDENTITY).save(path)
    loaded = dapcal.load(path, network())
    loaded(X)
    os.truncate(path, 100)
    with pytest.raises(BlockDamaged, match=r"model\.dap has 100 bytes in place of .*load it again.*by renaming"):
        loaded(X)


def test_a_file_that_is_written_to_in_place_is_checked_again(path):
    plain(IDENTITY).save(path)
    loaded = dapcal.load(path, network())
    before = loaded(X)
    os.utime(path, ns=(1, 1))
    assert_same(loaded(X), before)
    turned_over(path, place_of(path, POINTS) + 2 * BLOCK)
    with pytest.raises(BlockDamaged, match="block 3 of 3"):
        loaded(X)


# What people see


def test_doctor_checks_all_of_a_file_and_says_what_it_holds(path):
    artifact.save(plain(IDENTITY), path, {"kind": "table"}, {"rows": ROWS})
    whole = CliRunner().invoke(app, ["doctor", str(path)])
    assert whole.exit_code == 0, whole.output
    assert all(words in whole.stdout for words in (": whole,", "format 2, not signed", "rows 24 × 4 float32", "table"))
    told = json.loads(CliRunner().invoke(app, ["doctor", str(path), "--json"]).stdout)
    assert told["tensors"]["beside it"] == [{"name": "rows", "shape": [24, 4], "type": "float32", "bytes": 384}]
    turned_over(path, place_of(path, "further.rows") + 2 * BLOCK)
    damaged = CliRunner().invoke(app, ["doctor", str(path)])
    assert damaged.exit_code == 2
    assert "block 3 of 3 of 'further.rows'" in damaged.stderr
    assert damaged.stdout == ""


def test_doctor_wants_a_file_for_a_key(tmp_path):
    found = CliRunner().invoke(app, ["doctor", "--key", str(tmp_path / "key.pem")])
    assert found.exit_code == 2
    assert "Expected a file with --key" in found.stderr


def test_a_service_does_not_start_with_a_damaged_file(path, monkeypatch):
    """Nor go on with one: requests would fail."""
    models.load(previous_cases.FOLDER / "table-regression.dap").save(path)
    started: list[object] = []
    monkeypatch.setattr(dapcal.serve, "run", lambda *arguments, **named: started.append(arguments))
    assert CliRunner().invoke(app, ["serve", str(path)]).exit_code == 0
    assert len(started) == 1
    turned_over(path, place_of(path, "further.train.x") + 10 * BLOCK)
    refused = CliRunner().invoke(app, ["serve", str(path)])
    assert refused.exit_code == 2
    assert "block 11 of" in refused.stderr
    assert len(started) == 1


def test_a_damaged_file_is_not_what_a_client_of_the_service_is_told_to_mend():
    assert _is_refusal(ValueError("a row"))
    assert not _is_refusal(BlockDamaged("a file"))
