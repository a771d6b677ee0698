"""Predictions that go to a URL: through the file systems of pyarrow, or refused in one line, never to a file `s3:`."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow.fs import FileSystem

from table_cases import refused, run

fsspec = pytest.importorskip("fsspec")


def _knows_fsspec() -> bool:
    try:
        FileSystem.from_uri("fsspec+memory://bucket/out.csv")
    except ValueError:
        return False
    return True


in_memory = pytest.mark.skipif(not _knows_fsspec(), reason="this pyarrow knows no URLs of fsspec")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which a command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@in_memory
def test_predictions_go_to_an_object_store(houses: Path, here: Path):
    plain = here / "plain.csv"
    assert run("predict", houses / "house.dap", houses / "new.csv", "-o", plain).exit_code == 0
    store = fsspec.filesystem("memory")
    store.mkdir("/bucket")
    url = "fsspec+memory://bucket/out.csv"
    done = run("predict", houses / "house.dap", houses / "new.csv", "-o", url)
    assert done.exit_code == 0, done.output
    assert f"Saved to {url}" in done.stdout
    assert store.cat("/bucket/out.csv") == plain.read_bytes()
    assert [path.name for path in here.iterdir()] == ["plain.csv"]


def test_a_url_of_this_machine_is_its_file(houses: Path, here: Path):
    done = run("predict", houses / "house.dap", houses / "new.csv", "-o", f"file://{here}/out.csv")
    assert done.exit_code == 0, done.output
    assert (here / "out.csv").read_text().startswith("prediction,")
    refused(run("predict", houses / "house.dap", houses / "new.csv", "-o", f"file://{here}/a/b.csv"), "does not exist")
    again = here / "new.csv"
    again.write_bytes((houses / "new.csv").read_bytes())
    refused(run("predict", houses / "house.dap", again, "-o", f"file://{again}"), "would overwrite")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://localhost/out.csv", "http://localhost/out.csv cannot be reached (Unrecognized filesystem type"),
        ("fsspec+abacus://bucket/out.csv", "fsspec+abacus://bucket/out.csv cannot be reached"),
        pytest.param("fsspec+memory://bucket/out.docx", ".csv", marks=in_memory),
    ],
)
def test_a_url_that_nothing_can_be_written_to_is_refused_at_once(url: str, words: str, houses: Path, here: Path):
    refused(run("predict", houses / "house.dap", houses / "new.csv", "-o", url, "--quiet"), words)
    assert not list(here.iterdir())


@in_memory
def test_what_is_lost_on_the_way_is_told(houses: Path, here: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError("AWS Error ACCESS_DENIED")

    monkeypatch.setattr("pyarrow.fs.copy_files", fail)
    result = run("predict", houses / "house.dap", houses / "new.csv", "-o", "fsspec+memory://b/o.csv", "-q")
    refused(result, "fsspec+memory://b/o.csv cannot be written to (AWS Error ACCESS_DENIED)")
    assert "Saved" not in result.output


@pytest.mark.parametrize(
    "command",
    [
        ("fit", "train.csv", "--target", "price"),
        ("report", "house.dap"),
        ("predict", "house.dap", "new.csv", "--engine", "ray"),
    ],
)
def test_other_outputs_are_files_of_this_machine(command: tuple[str, ...], houses: Path, here: Path):
    arguments = [houses / part if "." in part else part for part in command]
    refused(run(*arguments, "-o", "fsspec+memory://bucket/out.x"), "fsspec+memory://bucket/out.x", "file")
    assert not list(here.iterdir())
