"""Files are complete, or not there, whoever writes them."""

from __future__ import annotations

import multiprocessing
import os
import stat
import threading
import time
import traceback
import warnings
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load

from cases import coarsely
from dapcal import artifact, files
from dapcal.calibrate import Calibrated, calibrate
from dapcal.files import complete_or_absent, remove_parts, write_text
from dapcal.tables.writing import writer
from dapcal.types import DapcalWarning

FORK = multiprocessing.get_context("fork")  # processes that have imported everything
HOURS_AGO = time.time() - 7300


def aged(path: Path) -> Path:
    os.utime(path, (HOURS_AGO, HOURS_AGO))
    return path


def test_a_file_appears_only_when_the_block_ends(tmp_path):
    path = tmp_path / "model.bin"
    with complete_or_absent(path) as part:
        part.write_bytes(b"new")
        assert part.parent == tmp_path  # same file system, so that replacing is atomic
        assert not path.exists()
        file = part.stat().st_ino
    assert path.read_bytes() == b"new"
    assert path.stat().st_ino == file  # moved, not copied
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "table.txt"
    path.write_text("a long old table")
    with complete_or_absent(str(path)) as part:
        part.write_text("new")
        assert path.read_text() == "a long old table"
    assert path.read_text() == "new"


@pytest.mark.parametrize("before", [None, "old"])
def test_an_exception_leaves_everything_as_it_was(tmp_path, before):
    path = tmp_path / "table.txt"
    if before is not None:
        path.write_text(before)

    def fail() -> None:
        with complete_or_absent(path) as part:
            part.write_text("half of it")
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fail()
    assert [p.read_text() for p in tmp_path.iterdir()] == ([] if before is None else [before])


def test_a_block_that_writes_nothing_is_an_error_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "table.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="Nothing was written"), complete_or_absent(path):
        pass
    assert path.read_text() == "old"


def test_text_is_written_as_utf8(tmp_path):
    write_text(tmp_path / "notes.txt", "φ = −4.85\n")
    assert (tmp_path / "notes.txt").read_bytes() == "φ = −4.85\n".encode()


def test_a_name_of_255_bytes_is_a_name(tmp_path):
    write_text(tmp_path / ("ä" * 127), "long")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["long"]


# Mode, owner, links


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
def test_an_existing_mode_is_kept(tmp_path, mode):
    path = tmp_path / "table.txt"
    path.write_text("old")
    path.chmod(mode)
    with complete_or_absent(path) as part:
        part.write_text("new")
        assert stat.S_IMODE(part.stat().st_mode) == 0o600  # not shown to others on the way
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_mode_of_other_files(tmp_path):
    (tmp_path / "other").touch()
    with complete_or_absent(tmp_path / "new") as part:
        (tmp_path / "inner").write_text("moved here, as safetensors does")
        (tmp_path / "inner").chmod(0o600)
        (tmp_path / "inner").replace(part)
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root may give files away")
def test_an_existing_owner_is_kept(tmp_path):
    path = tmp_path / "table.txt"
    path.write_text("old")
    os.chown(path, 4242, 4343)
    path.chmod(0o640)
    write_text(path, "new")
    assert (path.stat().st_uid, path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (4242, 4343, 0o640)


def test_an_owner_that_cannot_be_kept_is_told(tmp_path, monkeypatch):
    path = tmp_path / "table.txt"
    path.write_text("old")
    found = path.stat()
    other = os.stat_result((*found[:4], found.st_uid + 1, *found[5:]))

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "chown", refuse)
    with pytest.warns(DapcalWarning, match="belonged to another user or group and is now yours"):
        files._give(path, other, path)


def test_a_link_stays_and_its_target_is_replaced_whole(tmp_path):
    (tmp_path / "store").mkdir()
    target, link = tmp_path / "store" / "real.txt", tmp_path / "link.txt"
    target.write_text("old")
    link.symlink_to(target)
    with complete_or_absent(link) as part:
        assert part.parent == target.parent
        link.unlink()
        link.symlink_to(tmp_path / "elsewhere")  # links are followed once, at the start
        part.write_text("new")
    assert target.read_text() == "new"
    assert link.is_symlink()
    assert not (tmp_path / "elsewhere").exists()


def test_links_that_lead_nowhere_are_refused(tmp_path):
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name in ("dangling", "circle"):
        with pytest.raises(OSError, match=name):
            write_text(tmp_path / name, "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["circle", "dangling"]


def test_a_link_into_a_folder_that_may_not_be_written_to_is_refused(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "store" / "real")
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "store" and allowed(path, mode))
    with pytest.raises(PermissionError, match="store cannot be written to"):
        write_text(tmp_path / "link", "new")
    assert (tmp_path / "store" / "real").read_text() == "old"


def test_folders_and_devices_are_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        write_text(tmp_path, "new")
    with pytest.raises(OSError, match="a device or a pipe"):
        write_text(tmp_path / "pipe", "new")
    with pytest.raises(FileNotFoundError, match="create it first"):
        write_text(tmp_path / "nowhere" / "file", "new")


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    """Even if somebody guessed the part's name."""
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "0" * 16)
    (tmp_path / "precious").write_text("keep")
    (tmp_path / f".out.{'0' * 16}.part").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "out", "new")
    assert (tmp_path / "precious").read_text() == "keep"


# What killed writers leave


def killed(path: Path) -> Path:
    """A part as a killed writer leaves it."""

    def half() -> None:
        with complete_or_absent(path) as part:
            part.write_bytes(b"half")
            os._exit(9)

    process = FORK.Process(target=half)
    process.start()
    process.join()
    assert process.exitcode == 9
    return next(part for part in path.parent.glob(".*.part"))


def test_what_a_killed_writer_left_is_removed_after_an_hour_and_nothing_else(tmp_path):
    part = killed(tmp_path / "killed.bin")
    keep = {tmp_path / name for name in ("table.txt", ".hidden", "result.part", ".mine.part", f".{'f' * 16}.part")}
    for path in keep:
        path.write_text("keep")
        aged(path)
    remove_parts(tmp_path)
    assert part.exists()  # young: it may be one whose lock is just being taken
    aged(part)
    remove_parts(tmp_path)
    assert set(tmp_path.iterdir()) == keep


def test_the_next_writer_of_a_file_clears_what_was_left_of_it(tmp_path):
    part = aged(killed(tmp_path / "table.csv"))
    other = tmp_path / f".other.csv.{'a' * 16}.part"
    other.write_text("of another target")
    aged(other)
    write_text(tmp_path / "table.csv", "new")
    assert not part.exists()
    assert other.exists()


def test_a_part_that_is_still_written_is_never_removed(tmp_path):
    with complete_or_absent(tmp_path / "slow.bin") as part:
        part.write_bytes(b"slow")
        aged(part)
        remove_parts(tmp_path)
        write_text(tmp_path / "slow.bin", "of a faster writer")
        assert part.exists()
    assert (tmp_path / "slow.bin").read_bytes() == b"slow"


def test_without_locks_nothing_is_removed_and_that_is_told(tmp_path, monkeypatch):
    part = aged(killed(tmp_path / "table.csv"))

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with pytest.warns(DapcalWarning, match="no locks"):
        remove_parts(tmp_path)
    with pytest.warns(DapcalWarning, match="no locks"):
        write_text(tmp_path / "table.csv", "new")
    assert part.exists()
    assert (tmp_path / "table.csv").read_text() == "new"


# Several writers

TIMES = 50


def write_often(calibrated: Calibrated, folder: Path, process: int) -> None:
    """Four threads, which write three files; the exit code counts those that failed."""
    os.getpid = lambda: 7  # as in containers, whose processes have equal numbers
    failed = []

    def write(number: int) -> None:
        try:
            for _ in range(12):
                for name in ("t.csv", "t.parquet"):
                    with writer(folder / name) as append:
                        for _ in range(3):
                            append(pyarrow.table({"a": [number] * (1000 + number)}))
                mine = {"mine": torch.full((1000 + number,), number)}
                artifact.save(calibrated, folder / "t.dap", attachments=mine)
        except BaseException:
            traceback.print_exc()
            failed.append(number)

    threads = [threading.Thread(target=write, args=(10 * process + place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(len(failed))


def owner(values: list[int], parts: int) -> int:
    """The one writer whose file this is, whole."""
    assert set(values) == {values[0]}, "of two writers"
    assert len(values) == parts * (1000 + values[0]), "of one writer, but not whole"
    return values[0]


def test_of_several_writers_the_last_one_wins_whole(tmp_path, posterior, blobs):
    """Two processes of equal numbers with four threads each, writing the same three files some hundred times."""
    with coarsely(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DapcalWarning)
        calibrated = calibrate(posterior, train=blobs[0], held_out=blobs[1])
    writers = [FORK.Process(target=write_often, args=(calibrated, tmp_path, number)) for number in range(2)]
    for process in writers:
        process.start()
    looks, seen = 0, set()
    while any(process.is_alive() for process in writers):
        if all((tmp_path / name).exists() for name in ("t.csv", "t.parquet", "t.dap")):
            seen.add(owner([int(line) for line in (tmp_path / "t.csv").read_text().split()[1:]], 3))
            parquet = pyarrow.BufferReader((tmp_path / "t.parquet").read_bytes())  # opened once
            owner(pyarrow.parquet.read_table(parquet)["a"].to_pylist(), 3)
            owner(load((tmp_path / "t.dap").read_bytes())["further.mine"].int().tolist(), 1)
            looks += 1
        time.sleep(0.01)  # leaves the processors to the writers
    assert [process.exitcode for process in writers] == [0, 0]
    assert looks > 5
    assert len(seen) > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv", "t.dap", "t.parquet"]


def test_threads_that_write_one_file(tmp_path):
    start = threading.Barrier(4)

    def write(number: int) -> None:
        start.wait()
        for _ in range(TIMES):
            write_text(tmp_path / "one.txt", str(number) * 10_000)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = (tmp_path / "one.txt").read_text()
    assert text == text[0] * 10_000
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]
