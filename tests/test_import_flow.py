"""The way imports flow: each room of the source imports only from rooms above it, and nothing imports in a circle.

Every import counts, wherever it is written: at the top of a module, inside a function, or for type checkers alone. To
allow a new import, move what is wanted up in the house rather than the room down in `ROOMS`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

# From the top of the house to its bottom, floor by floor. A room has a name, and its modules and folders; where one is
# named inside the folder of another, the longer name counts. A room imports from the floors above its own and from
# itself, not from its neighbours on the same floor.
ROOMS: list[dict[str, tuple[str, ...]]] = [
    {"records": ("dapcal.records", "dapcal.storing", "dapcal.prior")},
    {
        "plain things": (
            "dapcal.data", "dapcal.files", "dapcal.interpolation", "dapcal.mapped", "dapcal.progress", "dapcal.png",
            "dapcal.amounts", "dapcal.moving",
            "dapcal.errors", "dapcal.inputs", "dapcal.npz", "dapcal.container", "dapcal.signing", "dapcal.visible",
            "dapcal.blocks", "dapcal.in_file",
        ),
    },
    {"engines": ("dapcal.engines",)},  # where work runs; they know nothing of what it is
    {
        "likelihoods": ("dapcal.likelihoods",),
        "gaussians": ("dapcal.gaussians",),
        "networks": ("dapcal.networks",),
    },
    {"outputs": ("dapcal.moments", "dapcal.diagnostics", "dapcal.evidence", "dapcal.predictive")},
    {"types": ("dapcal.types", "dapcal.ensembles", "dapcal.hardest")},
    {"posteriors": ("dapcal.posteriors",)},
    {"distances": ("dapcal.distances", "dapcal.ranks")},
    {"adjust": ("dapcal.adjust",), "metrics": ("dapcal.metrics", "dapcal.label_metrics")},
    {"calibration": ("dapcal.calibration",)},
    {"saving": ("dapcal.saving", "dapcal.probing"), "deploy": ("dapcal.deploy",)},
    {"calibrate": ("dapcal.calibrate", "dapcal.artifact", "dapcal.reading", "dapcal.trying", "dapcal.beside")},
    {
        "adapters": ("dapcal.adapters",),
        "detectors": ("dapcal.detectors",),
        "explain": ("dapcal.explain", "dapcal.explain_words"),
    },
    {
        "old names": (
            "dapcal.renamed", "dapcal.gap", "dapcal.losses", "dapcal.neighbors", "dapcal.ood_inputs",
            "dapcal.projectors", "dapcal.scales", "dapcal.spaces",
        ),
    },
    {"public list": ("dapcal.__init__",)},
    {"tables": ("dapcal.tables",)},
    {"recipes": ("dapcal.recipes",)},
    {
        "models": ("dapcal.models",),
        "sklearn": ("dapcal.sklearn",),
    },
    {"report": ("dapcal.report",), "serve": ("dapcal.serve",), "experiments": ("dapcal.experiments",)},
    {
        "cli": ("dapcal.cli", "dapcal.__main__"),  # below experiments: two commands run them
        "integrations": ("dapcal.integrations",),  # beside cli, as it writes reports too
    },
]  # fmt: skip

# what is known to be wrong, one line each as the test tells it; a line that is mended goes
STILL_TO_MEND: set[str] = set()


def test_imports_follow_the_flow():
    imports = imports_of(SOURCE)
    found = {*against_the_flow(imports), *circles(imports)}
    new, mended = sorted(found - STILL_TO_MEND), sorted(STILL_TO_MEND - found)
    assert not new, "\n".join(["imports against the flow:", *new])
    assert not mended, "\n".join(["mended: take these lines out of STILL_TO_MEND:", *mended])


def test_every_module_has_a_room():
    assert not [module for module in imports_of(SOURCE) if place(module) is None], "name them in ROOMS"


# The graph


@cache
def imports_of(source: Path) -> dict[str, set[str]]:
    """Every module with the modules of the same tree that it imports, anywhere in its code."""
    files = {name_of(path.relative_to(source)): path for path in source.rglob("*.py")}
    return {name: set(imported(path, name, files)) - {name} for name, path in files.items()}


def name_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, name: str, known: Iterable[str]) -> Iterator[str]:
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:  # a module of that package, or a name in it
                yield from [full for full in (f"{base}.{alias.name}", base) if full in known][:1]


def place(module: str) -> tuple[int, str] | None:
    """The floor and the room of a module."""
    path = "dapcal.__init__" if module == "dapcal" else module
    found = [
        (len(name), floor, room)
        for floor, rooms in enumerate(ROOMS)
        for room, names in rooms.items()
        for name in names
        if f"{path}.".startswith(f"{name}.")
    ]
    return max(found)[1:] if found else None


def against_the_flow(imports: dict[str, set[str]]) -> Iterator[str]:
    for module, wanted in imports.items():
        yield from (f"{module} -> {other}" for other in wanted if not flows(module, other))


def flows(module: str, other: str) -> bool:
    here, there = place(module), place(other)
    return here is None or there is None or here == there or there[0] < here[0]


def circles(imports: dict[str, set[str]]) -> Iterator[str]:
    """What stands side by side in a folder, modules and folders alike, and imports each other.

    Imports against the flow are left out: they are told already.
    """
    kept = {module: {other for other in wanted if flows(module, other)} for module, wanted in imports.items()}
    folders = {module.rpartition(".")[0] for module in imports if "." in module}
    for folder in sorted(folders):
        edges: dict[str, set[str]] = {}
        for module, wanted in kept.items():
            for other in wanted:
                one, two = child(folder, module), child(folder, other)
                if one and two and one != two:
                    edges.setdefault(one, set()).add(two)
        yield from (" <-> ".join(sorted(tied)) for tied in tied_together(edges))


def child(folder: str, module: str) -> str | None:
    """What of a folder a module is or lies in: the folder's own `__init__`, a module, or a folder in it."""
    if module == folder:
        return folder
    if not module.startswith(f"{folder}."):
        return None
    return ".".join(module.split(".")[: folder.count(".") + 2])


def tied_together(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of more than one node that all reach each other."""
    reached = {node: reach(edges, node) for node in edges}
    sets = {frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in edges}
    return {found for found in sets if len(found) > 1}


def reach(edges: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        fresh = edges.get(waiting.pop(), set()) - found
        found |= fresh
        waiting.extend(fresh)
    return found


# The test can fail


@pytest.mark.parametrize(
    "line",
    [
        "from dapcal.cli import app",
        "from dapcal import cli",
        "import dapcal.cli",
        "def late():\n    from dapcal.cli import app",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dapcal.cli import app",
        "from .. import cli",
        "from ..cli import app",
    ],
)
def test_every_way_of_importing_counts(line: str, tmp_path: Path):
    write(tmp_path, {"dapcal/cli/__init__.py": "app = 1", "dapcal/adjust/base.py": line})
    imports = imports_of(tmp_path)
    assert list(against_the_flow(imports)) == ["dapcal.adjust.base -> dapcal.cli"]


def test_neighbours_may_not_import_each_other(tmp_path: Path):
    write(
        tmp_path, {"dapcal/serve/app.py": "import dapcal.report.page", "dapcal/report/page.py": "import dapcal.types"}
    )
    assert list(against_the_flow(imports_of(tmp_path))) == ["dapcal.serve.app -> dapcal.report.page"]


def test_circles_between_modules_and_between_folders_are_found(tmp_path: Path):
    files = {
        "dapcal/report/a.py": "from dapcal.report import b",
        "dapcal/report/b.py": "def late():\n    from dapcal.report.a import x",
        "dapcal/report/kit/c.py": "from dapcal.report.questions import d",
        "dapcal/report/kit/e.py": "",
        "dapcal/report/questions/d.py": "from dapcal.report.kit import e",
        "dapcal/report/questions/f.py": "from dapcal.report.questions import d",
    }
    write(tmp_path, files)
    assert sorted(circles(imports_of(tmp_path))) == [
        "dapcal.report.a <-> dapcal.report.b",
        "dapcal.report.kit <-> dapcal.report.questions",
    ]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
