"""The documentation: its code runs, it shows what that code prints, and the site builds without a warning.

A page's ```python blocks share one namespace and run in order, in an empty folder; ```bash blocks run there too. A
```text block right after one of them is what it prints: words as they are, numbers to their last digit, in which they
may differ by one: machines add floats in different orders, and what lies between two roundings may go either way. A
page whose numbers differ by more prints fewer digits.
`DOCS_UPDATE=1 pytest tests/test_docs.py` writes those blocks anew. A comment before a block says that it is not run
(`<!-- not run: reason -->`), needs a library or a tool (`<!-- needs: laplace -->`) or is meant to warn
(`<!-- warns: of what -->`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pytest
import typer.main
from typer.testing import CliRunner

import dapcal
from cases import trace_once
from dapcal.cli import app
from dapcal.experiments.page.choosing import ADJUSTMENTS, COMPARED, GAP_POSTERIORS, POSTERIORS, SCORES, choosing_page
from dapcal.experiments.page.files import ImageResults, read_images

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
GENERATED = (
    "README.md",
    "CONTRIBUTING.md",
    "results.md",
    "no-harm.md",
    "posteriors.md",
    "data.md",
)  # not held to our fences
WANTS_DATA = ("data.md",)
MOST_NOT_RUN = 12

FENCE = re.compile(r"(?:^<!-- (?P<marker>[^\n]*?) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
NUMBER = re.compile(r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int  # of its first line of code
    language: str
    code: str
    marker: str

    @property
    def missing(self) -> str:
        """Why the block does not run here; empty where it does."""
        if self.marker.startswith("not run: "):
            return self.marker
        if not self.marker.startswith("needs: "):
            return ""
        name = self.marker.removeprefix("needs: ")
        return "" if importlib.util.find_spec(name) or shutil.which(name) else f"no {name}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page, text.count("\n", 0, found.start("code")) + 1, found["language"], found["code"], found["marker"] or ""
        )
        for found in FENCE.finditer(text)
    ]


def runnable(page: Path) -> bool:
    return any(block.language in ("python", "bash") and not block.missing for block in blocks(page))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that code runs in as a script does: modules there can be imported, and are forgotten after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.stem)
def test_every_block_runs_and_prints_what_the_page_shows(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    trace_once(monkeypatch)
    if page.name in WANTS_DATA and "DAPCAL_DATA" not in os.environ:
        pytest.skip("wants real data: set DAPCAL_DATA")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found, update = blocks(page), {}
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block.missing or block.language not in ("python", "bash"):
            continue
        printed = run_python(block, namespace) if block.language == "python" else run_bash(block, folder)
        if following is not None and following.language == "text" and follows(block, following):
            if os.environ.get("DOCS_UPDATE") == "1":
                update[following] = printed
            else:
                check_printed(following, printed)
    if update:
        write_printed(page, update)
    if page.name == "README.md":
        near, far = namespace["prediction"].probs.max(-1).values.tolist()
        assert far < near
        assert sorted(path.name for path in folder.iterdir()) == ["model.dap", "run.pt"]


def run_python(block: Block, namespace: dict[str, Any]) -> str:
    """Run under the page's name and lines, so that a traceback points into the page."""
    code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec", dont_inherit=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        if block.marker.startswith("needs: "):  # its library's warnings are its own
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", dapcal.DapcalWarning)
        if block.marker.startswith("warns: "):
            warnings.simplefilter("ignore", dapcal.DapcalWarning)
        exec(code, namespace)
    return printed.getvalue()


TERMINAL = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}


def run_bash(block: Block, folder: Path) -> str:
    lines = [line for line in block.code.splitlines() if line.strip()]
    if all(re.fullmatch(r"(dapcal|openssl) [^|&;<>$`\\]+", line) for line in lines):  # lines that stand alone
        return "".join(
            run_command(block, line) if line.startswith("dapcal ") else run_shell(block, line, folder) for line in lines
        )
    return run_shell(block, block.code, folder)


def run_shell(block: Block, code: str, folder: Path) -> str:
    tools = str(Path(sys.executable).parent)
    environment = os.environ | TERMINAL | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = ["bash", "-euo", "pipefail", "-c", code]
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        # files, not pipes: what a block that failed left running would hold a pipe open, and be waited for
        process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdout=printed, stderr=errors, start_new_session=True
        )
        ending = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        output, told = ((file.seek(0), file.read())[1] for file in (printed, errors))
    assert ending == 0, f"{block.page.name}:{block.line}\n{output}{told}"
    return output


def run_command(block: Block, line: str) -> str:
    """In this process, which has imported everything; blocks that need a shell start the program itself."""
    result = CliRunner().invoke(app, shlex.split(line, comments=True)[1:], env=TERMINAL)
    assert result.exit_code == 0, f"{block.page.name}:{block.line}\n{result.output}"
    return result.stdout


def follows(block: Block, following: Block) -> bool:
    """Whether only blank lines stand between two blocks."""
    return following.line - (block.line + block.code.count("\n")) <= 3


def check_printed(shown: Block, printed: str) -> None:
    place = f"{shown.page.name}:{shown.line}"
    assert words(shown.code) == words(printed), place
    for expected, got in zip(NUMBER.findall(shown.code), NUMBER.findall(printed), strict=True):
        assert same_digits(expected, got), f"{place}: {got} in place of {expected}"


def write_printed(page: Path, update: dict[Block, str]) -> None:
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    for block, printed in reversed(update.items()):
        shown = [f"{line.rstrip()}\n" for line in printed.rstrip().splitlines()]
        lines[block.line - 1 : block.line - 1 + block.code.count("\n")] = shown
    page.write_text("".join(lines), encoding="utf-8")


def words(text: str) -> list[str]:
    return NUMBER.sub("#", text).split()


def same_digits(expected: str, got: str) -> bool:
    """Whether two numbers are one number, rounded, on any processor; those of few digits without a point are counts.

    Processors add in other orders, so that a network which is trained ends a little elsewhere: two units of the last
    of at most four digits are let pass.
    """
    one, other = (Decimal(text.replace("−", "-").replace(",", "")) for text in (expected, got))
    if "." not in expected + got and "," not in expected:
        return one == other
    unit = Decimal(1).scaleb(min(one.as_tuple().exponent, other.as_tuple().exponent))
    return abs(one - other) <= 2 * max(unit, Decimal(1).scaleb(one.adjusted() - 3))


def test_shown_output_is_compared():
    shown = Block(DOCS / "page.md", 1, "text", "accuracy 0.97 of 300\n", "")
    check_printed(shown, "accuracy  0.97 of 300\n")
    check_printed(shown, "accuracy 0.98 of 300\n")
    for wrong in ("0.97 in 300", "0.94 of 300", "0.97 of 301", "0.97 of 300.4", "0.97"):
        with pytest.raises(AssertionError):
            check_printed(shown, f"accuracy {wrong}\n")


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ("1.0", "0.99", True),  # 1.00 with its last zero left out
        ("1.0", "0.9", True),
        ("1.0", "0.97", False),
        ("−0.50", "-0.51", True),
        ("0.01", "-0.02", False),
        ("1.876e+04", "1.877e+04", True),
        ("1.876e+04", "1.879e+04", False),
        ("16,458", "16,477", True),
        ("16,458", "16,480", False),
        ("16,458", "26,458", False),
        ("0.3752943", "0.375105", True),
        ("0.3752943", "0.375505", False),
        ("4.8e-06", "4.8e-05", False),
        ("99", "100", False),
    ],
)
def test_numbers_are_compared_to_their_last_digit(expected: str, got: str, same: bool):
    assert same_digits(expected, got) is same


def test_shown_output_is_written_anew(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("```text\n```\n\n```text\nold\nlines\n```\nend\n", encoding="utf-8")
    write_printed(page, dict(zip(blocks(page), ["first \n\n", "a\n\nb\n"], strict=True)))
    assert page.read_text(encoding="utf-8") == "```text\nfirst\n```\n\n```text\na\n\nb\n```\nend\n"


def test_a_marker_belongs_to_the_next_block_alone(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("a\n\n<!-- not run: why -->\n\n```bash\nrm\n```\n\n```python\nx = 1\ny\n```\n", encoding="utf-8")
    first, second = blocks(page)
    assert (first.language, first.line, first.missing) == ("bash", 6, "not run: why")
    assert (second.language, second.line, second.code, second.missing) == ("python", 10, "x = 1\ny\n", "")


def test_few_blocks_are_not_run_and_all_of_them_say_why():
    marked = [block for page in PAGES for block in blocks(page) if block.marker.startswith("not run:")]
    assert all(len(block.marker.removeprefix("not run:").split()) >= 2 for block in marked)
    assert len(marked) <= MOST_NOT_RUN, [f"{block.page.name}:{block.line} {block.marker}" for block in marked]


def test_every_block_says_what_it_is():
    ours = [page for page in PAGES if page.name not in GENERATED]
    assert all(block.language in ("python", "bash", "text", "json", "toml") for page in ours for block in blocks(page))
    assert not [page.name for page in ours if re.search(r"^ +```", page.read_text(encoding="utf-8"), re.M)]


def test_choosing_is_what_the_result_files_give():
    page = DOCS / "choosing.md"
    text = page.read_text(encoding="utf-8")
    assert choosing_page(text, ROOT / "results") == text, "run `make page`"
    with pytest.raises(ValueError, match="add their markers"):
        choosing_page(text.replace("<!-- table: scores -->", ""), ROOT / "results")


def test_choosing_recommends_what_the_numbers_say():
    images = [found for name in COMPARED if (found := read_images(ROOT / "results", name)) is not None]

    def nll(found: ImageResults, row: str) -> float:
        return mean(found.rows[row].values("test", "nll"))

    def worst(row: str, score: str) -> float:
        return min(mean(f.rows[row].values("ood", score, other, "auroc")) for f in images for other in f.outside)

    for found in images:
        for column in (0, 1):
            others = [nll(found, rows[column]) for label, rows in POSTERIORS.items() if label != "ensemble"]
            assert nll(found, POSTERIORS["ensemble"][column]) < min(others)
        assert nll(found, "DAP, ours") - nll(found, "VI") < 0.01
        assert found.rows["DAP, ours"].values("test", "accuracy") == found.rows["VI"].values("test", "accuracy")
        papers = [row for row, _ in ADJUSTMENTS.values() if row.startswith("DAP, paper's") and row in found.rows]
        assert min(nll(found, row) for row in papers) > 4 * nll(found, "VI")
    assert max(SCORES.values(), key=lambda pair: worst(*pair)) == ("DAP, ours", "OOD score")
    gap = json.loads((ROOT / "results" / "uci-gap.json").read_text(encoding="utf-8"))["summary"]["naval"]
    naval = {row: gap[f"{row} + ours"]["log_likelihood"]["mean"] for row in GAP_POSTERIORS.values()}
    assert set(sorted(naval, key=naval.__getitem__)[-2:]) == {"Laplace", "ensemble"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(module, reason="the documentation needs mkdocs: pip install 'dapcal[docs]'")
    folder = tmp_path_factory.mktemp("site")
    # not --quiet: warnings that are not shown are not counted either
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built(site: Path):
    for page in DOCS.rglob("*.md"):
        built = site / page.relative_to(DOCS).with_suffix("")
        assert (built.parent if page.stem == "index" else built).joinpath("index.html").exists(), page.name
    assert not list(site.rglob("*.py"))


def test_every_command_is_described(site: Path):
    text = (site / "command-line" / "index.html").read_text(encoding="utf-8")
    assert "--target" in text
    assert "options of" not in text
    for command in typer.main.get_command(app).commands:
        assert f'<h3 id="{command}">' in text, f"add a section with <!-- options of {command} --> to command-line.md"


def test_the_site_fetches_nothing_from_elsewhere(site: Path):
    for page in site.rglob("*.html"):
        outside = [address for address in assets(page) if re.match(r"(\w+:)?//", address)]
        assert not outside, f"{page.relative_to(site)}: {outside}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def assets(page: Path) -> Iterator[str]:
    """What a browser fetches to show the page; links in its text are not fetched."""
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            given = {name: value or "" for name, value in attributes}
            if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
                found.append(given.get("href", ""))
            elif tag != "a":
                found.extend(given[name] for name in ("src", "srcset", "poster", "data") if name in given)

    Reader().feed(page.read_text(encoding="utf-8"))
    yield from found
