"""docs/trust.md is made from its result files, and says what has not been run."""

import json
from pathlib import Path

import pytest

from dapcal.experiments.page.trust import TRIED, trust_page

ROOT = Path(__file__).parent.parent
PAGE = """<!-- table: torture -->
<!-- end of table -->
<!-- table: wide-tables -->
earlier numbers
<!-- end of table -->
"""
ENVIRONMENT = {"device": "cpu", "python": "3.11.7", "torch": "2.13.0"}


def test_the_tables_show_what_was_run_and_what_was_not(tmp_path: Path):
    assert trust_page(PAGE, tmp_path).count("Not run yet") == 2
    torture = {
        "kind": {"quick": False, "seed": 3},
        "commits": ["0123456789ab"],
        "missing": {"nodes": [20, 50]},
        "parts": {
            "service": {"tried": 0, "failed": 0, "seconds": 0, "measured": {"memory_growth_percent": 3.12}},
            "kills": {"tried": 1100, "failed": 0, "seconds": 3600},
            "nodes": {"tried": 60, "failed": 2, "seconds": 60, "skipped": {"no such disk": 1200}},
        },
        "environment": ENVIRONMENT,
    }
    (tmp_path / "torture.json").write_text(json.dumps(torture))
    wide = {
        "environment": ENVIRONMENT,
        "rows": 400,
        "columns": [500, 2000],
        "processor_seconds": {"nothing": [1.0, 1.0], "fit": [10.0, 42.0], "predict": [4.0, 6.0]},
        "peak_gib": [0.5, 1.25],
    }
    (tmp_path / "wide-tables.json").write_text(json.dumps(wide))
    found = trust_page(PAGE, tmp_path)
    assert "Not run yet" not in found
    assert "earlier numbers" not in found
    rows = {line.split(" | ")[0].strip("| "): line for line in found.splitlines() if line.startswith("| ")}
    assert rows["kills"].endswith("| 1,100 | 0 | 0 | 60 |")
    assert rows["in all"].endswith("| 1,160 | 2 | 1,200 | 61 |")
    assert "Could not be tried there:** nodes 1,200 (no such disk)." in found
    assert "All of it, seeds from 3" in found
    assert "0123456789ab" in found
    assert "Memory of the service grew by 3.1 % after" in found
    assert "Not tried yet:** nodes 20 of 50" in found
    assert "| 2,000 | 42.0 | 6.0 | 1.25 |" in found
    assert "4 times the columns take 4.2 times as long to fit and 1.5 times to predict" in found


@pytest.mark.parametrize("name", ["torture", "wide-tables"])
def test_what_was_run_holds_what_the_page_says(name: str):
    file = ROOT / "results" / f"{name}.json"
    if not file.exists():
        pytest.skip("not run yet, as the page says")
    found = json.loads(file.read_text(encoding="utf-8"))
    if name == "torture":
        assert not found["kind"]["quick"]
        assert set(found["parts"]) == set(TRIED)
        assert found["missing"] == {}
        assert {name: part["failed"] for name, part in found["parts"].items() if part["failed"]} == {}
    else:
        fit = found["processor_seconds"]["fit"]
        assert found["columns"] == [500, 2000]
        assert fit[-1] <= 5 * fit[0]


def test_the_page_is_made_from_the_files():
    text = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    assert trust_page(text, ROOT / "results") == text
