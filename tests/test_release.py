"""What a release says of itself: one version everywhere, bounds for all dependencies, a bill of materials."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import dapcal

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SAFE = {
    "torch": "2.10",
    "pillow": "10.3",
    "h11": "0.16",
    "scikit-learn": "1.5",
    "pyarrow": "14.0.1",
    "starlette": "0.47.2",
}
"""Versions before these have known holes in what is called."""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for texts in (PROJECT["dependencies"], *extras) for text in texts]


def test_one_version_everywhere():
    changelog, citation = (ROOT / "CHANGELOG.md").read_text(), (ROOT / "CITATION.cff").read_text()
    assert dapcal.__version__ == PROJECT["version"]
    assert f"\nversion: {PROJECT['version']}\n" in citation
    released = re.search(rf"^## {re.escape(PROJECT['version'])} \((\d{{4}}-\d\d-\d\d)\)$", changelog, re.M)
    assert released is not None
    assert f'date-released: "{released[1]}"' in citation


def test_every_dependency_has_a_lower_bound_without_known_holes(capsys):
    """Before: numpy and scipy had none, and torch 2.4 and pillow 10 were allowed."""
    found = [requirement for requirement in requirements() if requirement.name != "dapcal"]
    assert all(len(requirement.specifier) == 1 for requirement in found)
    assert all(specifier.operator == ">=" for requirement in found for specifier in requirement.specifier)
    for name, version in SAFE.items():
        bounds = {next(iter(requirement.specifier)).version for requirement in found if requirement.name == name}
        assert len(bounds) == 1  # also where several extras ask for it
        assert Version(bounds.pop()) >= Version(version)
    script("lowest").main()
    lines = capsys.readouterr().out.splitlines()
    assert "torch==2.13" in lines
    assert not any(line.startswith(("dapcal", "pytest")) for line in lines)


def test_a_requirement_without_a_lower_bound_is_refused():
    with pytest.raises(SystemExit, match="give it a lower bound"):
        script("lowest").lowest("numpy<3")


def test_the_bill_of_materials_holds_the_core_and_what_it_needs(tmp_path):
    sbom = script("sbom")
    sbom.main(tmp_path)
    bill = json.loads((tmp_path / f"dapcal-{sbom.metadata.version('dapcal')}.cdx.json").read_text())
    parts = {part["name"]: part for part in bill["components"]}
    assert {"torch", "numpy", "scipy", "safetensors", "sympy", "h11"} <= set(parts)  # sympy by way of torch
    assert "pytest" not in parts
    assert all(part["purl"].startswith("pkg:pypi/") for part in parts.values())
    references = {part["bom-ref"] for part in [*parts.values(), bill["metadata"]["component"]]}
    assert {one["ref"] for one in bill["dependencies"]} == references
    assert {other for one in bill["dependencies"] for other in one["dependsOn"]} <= references
    pins = (tmp_path / f"dapcal-{sbom.metadata.version('dapcal')}.constraints.txt").read_text().splitlines()
    assert len(pins) == len(parts)
