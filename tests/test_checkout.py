"""Which commit a result was made from."""

import shutil
import subprocess
from pathlib import Path

import pytest

from dapcal.experiments import checkout as module
from dapcal.experiments.checkout import NOT_KNOWN, commit
from dapcal.experiments.records import environment

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
PLACE = Path("src/dapcal/experiments")


def git(folder: Path, *words: str) -> str:
    told = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *told, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    for file in (PLACE / "checkout.py", Path("results/a.json")):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def test_the_commit_and_whether_the_tree_was_changed(checkout: Path):
    found = commit(checkout / PLACE)
    assert git(checkout, "rev-parse", "HEAD").startswith(found)
    assert len(found) == 12
    (checkout / "results/a.json").write_text("2")  # what a run itself writes is no change
    assert commit(checkout / PLACE) == found
    (checkout / PLACE / "checkout.py").write_text("2")
    assert commit(checkout / PLACE) == f"{found}, changed"


def test_nothing_is_claimed_outside_a_checkout_of_this_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert commit(tmp_path) == NOT_KNOWN
    git(tmp_path, "init", "--quiet")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "another project")
    assert commit(tmp_path) == NOT_KNOWN
    monkeypatch.setenv("PATH", "")
    assert commit(tmp_path) == NOT_KNOWN


def test_a_module_that_git_does_not_know_is_a_change_and_other_files_are_none(checkout: Path):
    found = commit(checkout / PLACE)
    (checkout / "notes.txt").write_text("1")
    assert commit(checkout / PLACE) == found
    (checkout / PLACE / "more.py").write_text("1")
    assert commit(checkout / PLACE) == f"{found}, changed"


def test_another_repository_named_by_a_hook_is_not_taken_for_this_one(checkout: Path, tmp_path_factory, monkeypatch):
    found = commit(checkout / PLACE)
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "--quiet")
    git(other, "commit", "--quiet", "--allow-empty", "-m", "another")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert commit(checkout / PLACE) == found


def test_where_changes_cannot_be_told_it_says_so(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    found, plain = commit(checkout / PLACE), module._git
    monkeypatch.setattr(module, "_git", lambda at, *words: None if words[0] == "status" else plain(at, *words))
    assert commit(checkout / PLACE) == f"{found}, not known whether changed"


def test_every_environment_names_the_commit_and_no_folder():
    found = environment()
    assert found["commit"] == commit()
    assert not any(str(Path.home()) in value or str(Path(__file__).parent.parent) in value for value in found.values())
