"""Files are complete, or not there."""

from __future__ import annotations

import pytest

from dapcal.files import complete_or_absent, remove_parts, write_text


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
    with pytest.raises(FileNotFoundError), complete_or_absent(path):
        pass
    assert path.read_text() == "old"


def test_text_is_written_as_utf8(tmp_path):
    write_text(tmp_path / "notes.txt", "φ = −4.85\n")
    assert (tmp_path / "notes.txt").read_bytes() == "φ = −4.85\n".encode()


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    context = complete_or_absent(tmp_path / "killed.bin")
    context.__enter__().write_bytes(b"half")  # never ends, as in a killed process
    keep = {tmp_path / name for name in ("table.txt", ".hidden", "result.part")}
    for path in keep:
        path.write_text("keep")
    assert len(list(tmp_path.iterdir())) == 4
    remove_parts(tmp_path)
    assert set(tmp_path.iterdir()) == keep
    context.gen.close()
