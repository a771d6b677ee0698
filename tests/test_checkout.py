"""Which commit a result was made from."""

import shutil
import subprocess
from pathlib import Path

import pytest

from dapcal.experiments.checkout import NOT_KNOWN, commit

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
