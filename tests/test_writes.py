"""Every place that writes a file does so through the one writer, `dapcal.files`; this file lists them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

WRITERS = {  # functions that write, by file
    "docs/figures.py": {"main"},
    "src/dapcal/cli/common.py": {"given"},
    "src/dapcal/saving.py": {"save"},
    "src/dapcal/deploy/programs.py": {"to_onnx"},
    "src/dapcal/distances/on_disk.py": {"_write"},
    "src/dapcal/experiments/cifar/bench.py": {"_point"},
    "src/dapcal/experiments/cifar/keeping.py": {"_write"},
    "src/dapcal/experiments/cifar/training.py": {"_write"},
    "src/dapcal/experiments/datasets/decoded.py": {"_write"},
    "src/dapcal/experiments/datasets/downloads.py": {"download"},
    "src/dapcal/experiments/page/no_harm.py": {"write"},
    "src/dapcal/experiments/page/performance.py": {"write"},
    "src/dapcal/experiments/page/results.py": {"write"},
    "src/dapcal/experiments/runner.py": {"run_and_write"},
    "src/dapcal/experiments/gap/experiment.py": {"_train"},
    "src/dapcal/models/parts.py": {"write"},
    "src/dapcal/models/writing.py": {"writer"},
    "src/dapcal/posteriors/_training/checkpoints.py": {"write"},
    "src/dapcal/tables/urls.py": {"fetch"},
    "src/dapcal/tables/writing.py": {"writer"},
}
HELPERS = {  # functions that are handed the part file of one of those
    "src/dapcal/experiments/datasets/downloads.py": {"_write_parquet"},
    "src/dapcal/experiments/page/drawings.py": {"save"},
    "src/dapcal/models/writing.py": {"_savez"},
    "src/dapcal/tables/writing.py": {"_parquet_writer", "_text_writer"},
}
THE_ONE = "src/dapcal/files.py"
PRIMITIVES = {
    "write_bytes", "save_file", "savefig", "savez", "savez_compressed", "write_table", "to_csv", "to_parquet",
    "symlink_to", "copyfile", "copy2", "touch", "ParquetWriter", "CSVWriter", "mkstemp", "NamedTemporaryFile",
    "TemporaryFile", "np.save", "torch.save", "program.save", "os.rename", "os.replace", "shutil.copy", "shutil.move",
    "json.dump",
}  # fmt: skip


def is_written_by(call: ast.Call) -> bool:
    """Whether a call writes a file by itself: a primitive of Python or of a library, or an `open` for writing."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = getattr(getattr(function, "value", None), "id", "")
    if name in ("open", "fdopen", "ZipFile"):
        modes = [value.value for value in call.args[:2] if isinstance(value, ast.Constant)]
        return any(isinstance(mode, str) and len(mode) <= 3 and set(mode) & set("wax+") for mode in modes)
    if name == "write_text" and isinstance(function, ast.Attribute):
        return True  # of a path; the function of that name is the one writer's
    return name in PRIMITIVES or f"{owner}.{name}" in PRIMITIVES


@cache
def functions(path: Path) -> dict[str, list[ast.Call]]:
    """Those at the top level, and methods, with the calls in them."""
    found: dict[str, list[ast.Call]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for member in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(member, ast.FunctionDef):
                calls = [inner for inner in ast.walk(member) if isinstance(inner, ast.Call)]
                found[member.name] = found.get(member.name, []) + calls
    return found


def found(condition: Callable[[ast.Call], bool]) -> dict[str, set[str]]:
    places: dict[str, set[str]] = {}
    for path in sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/*.py")]):
        name = path.relative_to(ROOT).as_posix()
        for function, calls in functions(path).items() if name != THE_ONE else ():
            if any(map(condition, calls)):
                places.setdefault(name, set()).add(function)
    return places


def test_every_place_that_writes_a_file_is_listed():
    listed = {name: WRITERS.get(name, set()) | HELPERS.get(name, set()) for name in WRITERS | HELPERS}
    by_themselves = found(is_written_by)
    through_the_one = found(lambda call: getattr(call.func, "id", "") == "complete_or_absent")
    assert through_the_one == WRITERS
    assert {name: by_themselves.get(name, set()) | WRITERS.get(name, set()) for name in listed} == listed
    assert set(by_themselves) <= set(listed)


@pytest.mark.parametrize(
    ("line", "writes"),
    [
        ("open(path, 'w')", True),
        ("path.open('ab')", True),
        ("zipfile.ZipFile(path, 'w')", True),
        ("path.write_text('x')", True),
        ("torch.save(x, path)", True),
        ("figure.savefig(path)", True),
        ("write_text(path, 'x')", False),
        ("open(path)", False),
        ("path.open('rb')", False),
        ("text.replace('a', 'b')", False),
    ],
)
def test_what_counts_as_writing(line: str, writes: bool):
    (call,) = (node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call))
    assert is_written_by(call) == writes
