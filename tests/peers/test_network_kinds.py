"""The table of docs/networks.md, made anew: every kind of network, those of other libraries included."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
COMMITTED = json.loads((ROOT / "results" / "networks.json").read_text(encoding="utf-8"))["rows"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("networks") / "networks.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "networks.py"), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return json.loads(out.read_text(encoding="utf-8"))["rows"]


def test_libraries_are_there():
    assert all(importlib.util.find_spec(name) for name in ("transformers", "lightning", "peft", "accelerate"))
    assert rows_of_libraries() <= set(COMMITTED)


def rows_of_libraries() -> set[str]:
    return {
        "Hugging Face BERT",
        "Hugging Face GPT-2",
        "Hugging Face ViT",
        "LoRA adapters (peft) on BERT",
        "Lightning module",
    }


@pytest.mark.parametrize("name", COMMITTED)
def test_it_does_what_the_page_says(rows, name):
    def outcomes(row):
        return {step: outcome if outcome in ("works", "–") else "refused" for step, outcome in row["steps"].items()}

    assert rows[name]["features"] == COMMITTED[name]["features"]
    assert outcomes(rows[name]) == outcomes(COMMITTED[name])


def test_no_error_is_raw(rows):
    assert "NOT A SENTENCE" not in json.dumps(rows)
