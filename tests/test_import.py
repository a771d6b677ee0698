"""Importing dapcal is light and changes nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dapcal

HEAVY = ("matplotlib", "typer", "rich", "sklearn", "scipy.stats", "pandas", "pyro")

PROBE = """
import json, sys, time
import torch
before = {
    "dtype": str(torch.get_default_dtype()), "threads": torch.get_num_threads(),
    "grad": torch.is_grad_enabled(), "rng": torch.get_rng_state().tolist(),
    "precision": torch.get_float32_matmul_precision(),
    "deterministic": torch.are_deterministic_algorithms_enabled(),
}
known, start = set(sys.modules), time.perf_counter()
import dapcal
seconds = time.perf_counter() - start
after = {
    "dtype": str(torch.get_default_dtype()), "threads": torch.get_num_threads(),
    "grad": torch.is_grad_enabled(), "rng": torch.get_rng_state().tolist(),
    "precision": torch.get_float32_matmul_precision(),
    "deterministic": torch.are_deterministic_algorithms_enabled(),
}
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - known), "same": before == after}))
"""


def probe() -> dict:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_dapcal_imports_no_heavy_package_and_changes_no_global_state(record_property):
    found = probe()
    record_property("seconds beyond torch", found["seconds"])  # information only
    heavy = [name for name in found["new"] for package in HEAVY if name == package or name.startswith(package + ".")]
    assert heavy == []
    assert "dapcal" in found["new"]
    assert found["same"]


def test_everything_in_the_public_list_is_there():
    import dapcal

    assert [name for name in dapcal.__all__ if not hasattr(dapcal, name)] == []
    assert sorted(dapcal.__all__) == dapcal.__all__


def test_the_walk_for_newcomers_goes_through_files_that_exist():
    root = Path(__file__).parent.parent
    walk = (root / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## A walk")[2].partition("\n## ")[0]
    stops = re.findall(r"^\d+\. `([^`]+)`", walk, flags=re.MULTILINE)
    assert 6 <= len(stops) <= 12
    assert [stop for stop in stops if not (root / stop).is_file()] == []


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("gap", "GapCrossValidation"),
        ("losses", "Target"),
        ("neighbors", "TorchIndex"),
        ("ood_inputs", "Around"),
        ("projectors", "Features"),
        ("scales", "Exp"),
        ("spaces", "informative"),
    ],
)
def test_old_names_hand_on_with_a_warning(old: str, name: str):
    module = getattr(dapcal, old)
    with pytest.warns(DeprecationWarning, match=rf"dapcal\.{old} is now dapcal\."):
        assert getattr(module, name).__name__ == name
