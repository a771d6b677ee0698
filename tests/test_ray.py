"""More than one machine: three nodes of Ray, some of which are lost, and the answers of one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from torch import nn

import dapcal
from dapcal.calibration.gap import GapCrossValidation
from dapcal.engines import Engine, Local, named
from dapcal.engines.engine import in_order
from dapcal.engines.nodes import check_versions, nodes_of, versions
from dapcal.engines.ray import Ray, connected
from dapcal.experiments import parallel
from dapcal.likelihoods import Categorical
from dapcal.models import blocks
from dapcal.models.parts import Parts
from dapcal.posteriors import ensemble
from dapcal.posteriors.network import NetworkPosterior
from ray_cases import SETTINGS, Nodes, cluster
from table_cases import refused, run, write_houses, write_rows

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning"),  # of networks that have learnt next to nothing
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # of Ray's own sockets and logs
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ROWS = 60_000


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with cluster() as found:
            yield found


@pytest.fixture
def engine(nodes: Nodes) -> Iterator[Ray]:
    found = connected(nodes.address)
    yield found
    found.release()  # the CPUs are the next one's


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a table as CSV and Parquet, and what one machine makes of them."""
    found = write_houses(tmp_path_factory.mktemp("ray"))
    write_rows(found / "rows.csv", ROWS, seed=3)
    table = pyarrow.csv.read_csv(found / "rows.csv")
    table = table.set_column(3, "city", table["city"].dictionary_encode())  # whose batches end with row groups
    pyarrow.parquet.write_table(table, found / "rows.parquet", row_group_size=25_000)
    for suffix in ("csv", "parquet"):
        done = run("predict", found / "house.dap", found / f"rows.{suffix}", "-o", found / f"one.{suffix}", *KEEP)
        assert done.exit_code == 0, done.output
        (found / f"one-{suffix}.txt").write_text(done.stdout)
    return found


KEEP = ("--keep", "id", "--keep", "city")


def told(folder: Path, suffix: str, out: Path) -> str:
    """What one machine has said, of another file."""
    return (folder / f"one-{suffix}.txt").read_text().replace(str(folder / f"one.{suffix}"), str(out))


# What does not need a cluster


def test_the_local_engine_keeps_order_and_is_the_default():
    assert in_order(named("local"), 3, lambda held, item: held + item, [4, 5]) == [7, 8]
    assert named(Local()) == Local()
    with pytest.raises(ValueError, match="Expected an engine among local, ray, got 'spark'"):
        named("spark")
    with pytest.raises(ValueError, match="is for the engine ray"):
        named("local", "10.0.0.1:6379")


def test_other_versions_are_refused_by_name():
    other = {**versions(), "torch": "1.0", "dapcal": ""}
    with pytest.raises(ValueError, match=r"10\.0\.0\.2 .* dapcal not installed where .* torch 1\.0 where .* runs here"):
        check_versions({"10.0.0.1": versions(), "10.0.0.2": other})


@pytest.mark.parametrize(
    ("address", "words"), [("nowhere", "HOST:PORT"), ("127.0.0.1:1", "There is no Ray cluster at 127.0.0.1:1")]
)
def test_no_cluster_is_one_sentence(address: str, words: str, folder: Path, tmp_path: Path):
    call = ("predict", folder / "house.dap", folder / "new.csv", "-o", tmp_path / "o.csv")
    refused(run(*call, "--engine", "ray", "--address", address), words)
    refused(run(*call, "--engine", "spark"), "Expected --engine as local or ray")
    refused(run(*call, "--address", address), "leave it out, or choose --engine ray")
    refused(run(*call, "--engine", "ray", "--device", "cuda"), "leave --device out")


def test_blocks_hold_the_batches_of_one_machine(folder: Path):
    whole = [batch for path in ("rows.csv", "rows.parquet") for batch in blocks.unconverted(folder / path)]
    found, seen = [], 0
    for block in blocks.blocks_of([folder / "rows.csv", folder / "rows.parquet"], 2):
        tables = list(blocks._tables(block))
        assert block.seen == seen
        assert block.rows == sum(map(len, tables))
        seen += block.rows
        found += tables
    assert seen == 2 * ROWS
    assert [len(table) for table in found] == [len(table) for table in whole]
    for one, two in zip(found, whole, strict=True):
        assert one.to_pydict() == two.to_pydict()


def test_rows_that_workers_cannot_see_are_sent(folder: Path):
    places = list(blocks.blocks_of([folder / "rows.parquet"], 2))
    sent = list(blocks.blocks_of([folder / "rows.parquet"], 2, [folder / "rows.parquet"]))
    assert all(block.tables is None for block in places)
    for one, two in zip(places, sent, strict=True):
        for here, there in zip(blocks._tables(one), blocks._tables(two), strict=True):
            assert here.to_pydict() == there.to_pydict()


def test_a_url_is_read_as_its_file_is(folder: Path, tmp_path: Path):
    url = f"file://{folder / 'rows.parquet'}"
    done = run("predict", folder / "house.dap", url, "-o", tmp_path / "o.parquet", *KEEP)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "o.parquet").read_bytes() == (folder / "one.parquet").read_bytes()
    for wrong in (f"file://{folder}", f"file://{folder / 'none.parquet'}"):
        refused(run("predict", folder / "house.dap", wrong, "-o", tmp_path / "x.csv"), "There is no file file:///")
    refused(run("predict", folder / "house.dap", "nowhere://x/y.csv", "-o", tmp_path / "x.csv"), "cannot be reached")


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path):
    parts, own = Parts(tmp_path / "out.csv"), tmp_path / "out.csv.parts" / "letter.txt"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(ValueError, match=r"holds letter.txt, where unfinished blocks go"):
        parts.begin({"model": "one"})
    own.rename(tmp_path / "letter.txt")
    assert parts.begin({"model": "one"}) == ""
    parts.write(0, pa.py_buffer(b"block"))
    assert "going on with 1 finished block" in parts.begin({"model": "one"})
    assert "1 finished block of other work (other model), which are not used" in parts.begin({"model": "two"})
    assert not parts.has(0)


def digits(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator)
    return x, (x[:, 0] + 0.3 * torch.randn(n, generator=generator) > 0).long()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def members(engine: Engine | str) -> NetworkPosterior:
    return ensemble.fit(small, Categorical(), digits(200, 0), members=3, epochs=3, engine=engine)


def calibrated(posterior: NetworkPosterior, engine: Engine | str | None) -> tuple[dapcal.Calibrated, torch.Tensor]:
    found = dapcal.calibrate(posterior, train=digits(200, 0), held_out=digits(100, 1), engine=engine)
    prediction = found(digits(50, 2)[0] * 2)
    return found, torch.stack([prediction.distance, prediction.ood_score, prediction.epistemic])


def same_everywhere(engine: Engine) -> None:
    """Members, φ, distances and scores on an engine are those of one machine, to the last bit."""
    here, there = members("local"), members(engine)
    assert torch.equal(here.outputs(digits(20, 3)[0]), there.outputs(digits(20, 3)[0]))
    one, two = calibrated(here, None), calibrated(here, engine)
    assert one[0].phi == two[0].phi
    assert torch.equal(one[1], two[1])


def test_shards_answer_as_one_index():
    same_everywhere(Local(workers=3))


def refit(x: torch.Tensor, y: torch.Tensor) -> NetworkPosterior:
    return ensemble.fit(small, Categorical(), (x, y), members=2, epochs=2)


# On three nodes


def there(nodes: Nodes) -> tuple[str, ...]:
    return ("--engine", "ray", "--address", nodes.address)


def divided(number: float, by: float) -> float:
    return number / by


def test_calls_of_experiments_are_done_on_the_nodes(engine: Ray):
    with parallel.processes(1, engine.submit) as submit:
        calls = [submit(divided, number, 0.5) for number in range(5)]
        found = [call.result() for finished in parallel.looks(calls) for call in finished]
        assert sorted(found) == [0, 2, 4, 6, 8]
        with pytest.raises(ZeroDivisionError):
            list(parallel.looks([submit(divided, 1, 0)]))


def test_calibration_on_three_nodes_is_that_of_one(engine: Engine):
    same_everywhere(engine)
    gaps = [GapCrossValidation(refit, regions=2, engine=where) for where in ("local", engine)]
    found = [
        dapcal.calibrate(refit(*digits(200, 0)), train=digits(200, 0), held_out=digits(100, 1), loss=g) for g in gaps
    ]
    assert found[0].phi == found[1].phi


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_three_nodes_write_the_bytes_of_one_machine(suffix: str, nodes: Nodes, folder: Path, tmp_path: Path):
    out = tmp_path / f"out.{suffix}"
    done = run("predict", folder / "house.dap", folder / f"rows.{suffix}", "-o", out, *KEEP, *there(nodes))
    assert done.exit_code == 0, done.output
    assert out.read_bytes() == (folder / f"one.{suffix}").read_bytes()
    assert done.stdout == told(folder, suffix, out)
    assert list(tmp_path.iterdir()) == [out]


def test_an_error_is_that_of_the_first_row_and_one_sentence(nodes: Nodes, folder: Path, tmp_path: Path):
    lines = (folder / "rows.csv").read_text().splitlines()
    for row in (9, ROWS - 9):
        lines[row] = lines[row].replace(lines[row].split(",")[1], "wide", 1)
    (tmp_path / "bad.csv").write_text("\n".join(lines))
    call = ("predict", folder / "house.dap", tmp_path / "bad.csv", "-o", tmp_path / "o.csv")
    one, three = run(*call), run(*call, *there(nodes))
    refused(three, "row 9: column `area` holds 'wide'")
    assert three.stderr.splitlines()[-1] == one.stderr.splitlines()[-1]
    assert not (tmp_path / "o.csv").exists()


def killing(held: str, item: int) -> tuple[int, int]:
    """A worker that ends in the middle, once."""
    mark = Path(held) / f"{item}"
    if item % 5 == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item, os.getpid()


def test_workers_that_are_killed_cost_nothing(engine: Engine, tmp_path: Path):
    found = in_order(engine, str(tmp_path), killing, range(12))
    assert [item for item, _ in found] == list(range(12))
    assert len(list(tmp_path.iterdir())) == 2


def test_all_nodes_are_seen_with_their_versions(engine: Ray):
    found = nodes_of()
    assert len(found) == 3
    assert all(node == versions() for node in found.values())
    done = run("doctor", "--engine", "ray")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("node ") == 3


def driver(folder: Path, out: Path, address: str) -> subprocess.Popen[bytes]:
    words = ["predict", folder / "house.dap", folder / "rows.parquet", "-o", out, *KEEP]
    call = [sys.executable, "-m", "dapcal", *map(str, words), "--engine", "ray", "--address", address]
    return subprocess.Popen(call, env={**os.environ, **SETTINGS}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finished_blocks(out: Path) -> int:
    return len(list(out.with_name(f"{out.name}.parts").glob("*.arrow")))


def first_block(out: Path, process: subprocess.Popen[bytes]) -> None:
    while not finished_blocks(out):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.02)


def test_driver_and_node_killed_and_begun_again(nodes: Nodes, folder: Path, tmp_path: Path):
    out = tmp_path / "out.parquet"
    begun = driver(folder, out, nodes.address)
    first_block(out, begun)
    begun.kill()
    begun.communicate()
    assert not out.exists()
    finished = finished_blocks(out)
    again = driver(folder, out, nodes.address)
    while finished_blocks(out) == finished and again.poll() is None:  # a node that has its share of the rows
        time.sleep(0.02)
    nodes.kill()
    said, errors = again.communicate(timeout=240)
    assert again.returncode == 0, errors
    assert said.decode() == told(folder, "parquet", out)
    assert b"going on with" in errors
    assert out.read_bytes() == (folder / "one.parquet").read_bytes()
    assert not out.with_name("out.parquet.parts").exists()


def test_without_its_token_a_cluster_is_not_reached(nodes: Nodes, tmp_path: Path):
    settings = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_TOKEN": "0" * 64}
    call = [sys.executable, "-m", "dapcal", "doctor", *there(nodes)]
    done = subprocess.run(call, env=settings, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "token" in line


def test_unfinished_blocks_of_other_work_are_not_used(nodes: Nodes, folder: Path, tmp_path: Path):
    out = tmp_path / "out.csv"
    parts = tmp_path / "out.csv.parts"
    parts.mkdir()
    (parts / "manifest.json").write_text('{"model": "another"}')
    (parts / "00000000.arrow").write_bytes(b"of another")
    done = run("predict", folder / "house.dap", folder / "new.csv", "-o", out, *there(nodes))
    assert done.exit_code == 0, done.output
    assert "1 finished block of other work (other model, files" in " ".join(done.stderr.split())
    assert len(out.read_text().splitlines()) == 31
