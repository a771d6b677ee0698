"""The performance page: it shows the committed file, names what is not measured, and says why a limit is missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dapcal.experiments.page.performance import NOT_YET, REASONS, TITLES, performance_page, read, reason_of, write
from dapcal.experiments.performance import AS_FAST, Limit, Line, Row, to_plain

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
FOUND = read(ROOT / "results")
MISSED = [(name, row) for name, rows in FOUND.rows.items() for row in rows if row.met is False]

STEP = {"seconds": 12.5, "processor_seconds": 20.0, "anonymous_gigabytes_peak": 0.25}
INDEX = {
    "points": 10**7, "dimension": 64, "gigabytes": 2.56, "note": "approximate neighbours, recall 0.97", "recall": 0.961,
    "excess_99": 0.0123, "never_too_small": True, "file_gigabytes": 2.6, "same_after_loading": True, "build": STEP,
    "exact_10000": STEP,
}  # fmt: skip
TABLE = {
    "rows": 10**7, "columns": 20, "gigabytes": 4.2, "seconds": 1800, "model_megabytes": 12.34, "rmse_all_rows": 0.4,
    "rmse_sample": 0.5, "distances": {
        "new_rows": 1000, "too_large": {"features": [0.125, 0.5]}, "beyond_radius": {"sample": 0.1, "all_rows": 0.05},
        "mean_d0": {"sample": 0.25, "all_rows": 0.125},
    },
}  # fmt: skip

ROWS = {
    "laplace": [Row("fit", "s", [1.0, 3.0, 2.0], "laplace-torch", [2.0, 2.0, 2.0], AS_FAST, note="0.1 apart")],
    "nearest": [
        Row("search", "s", [2.0, 3.0, 4.0], "faiss", [1.0, 1.0, 1.0], Limit(2.5), profile={"waiting": 0.75}),
        Row("search", "s", [2.0, 3.0, 4.0], "scikit-learn", [9.0, 9.0, 9.0], Limit(2.5)),
    ],
    "service": [
        Row("batches", "rows/s", [60_000.0] * 3, "FastAPI", [70_000.0] * 3, Limit(50_000.0, "ours", least=True)),
        Row("latency", "ms", [5.0, 6.0, 7.0], limit=Limit(4.0, "ours")),
    ],
}
LINES = [
    Line(name, over, [10, 100, 1000], [[1.0, 2.0], [1.0, 1.0], [10.0, 10.0]])
    for name in ("ours", "faiss")
    for over in ("points", "queries")
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with a file that lacks most questions, and the page as it is."""
    about = {"seconds": 60.0, "load": [0.5, 3.0], "settings": {"commit": "abc", "repeats": 3, "small": False}}
    questions: dict[str, Any] = {name: {"rows": list(map(to_plain, rows))} | about for name, rows in ROWS.items()}
    questions["scaling"] = {"lines": list(map(to_plain, LINES))} | about
    found = {
        "environment": dict.fromkeys(("dapcal", "python", "torch", "numpy"), "1")
        | {"processor": "Some CPU", "cores": 2, "device": "cpu"},
        "peers": {"faiss-cpu": "1.9"},
        "questions": questions,
        "missing": [name for name in TITLES if name not in questions],
    }
    (tmp_path / "performance.json").write_text(json.dumps(found), encoding="utf-8")
    (tmp_path / "performance.md").write_text(TEXT, encoding="utf-8")
    return tmp_path


def test_the_page_shows_the_result_file():
    assert performance_page(TEXT, ROOT / "results").text == TEXT, "run `make page`"


def test_what_is_committed_is_of_full_sizes_and_the_page_names_what_is_not_there():
    questions, missing = set(FOUND.about["questions"]), set(FOUND.about["missing"])
    assert not any(one["settings"]["small"] for one in FOUND.about["questions"].values())
    assert not questions & missing
    assert questions | missing == set(TITLES)
    assert ("**Not measured yet:**" in TEXT) == bool(missing)


def test_every_row_that_misses_its_limit_has_a_reason_or_a_profile():
    assert not [(name, row.name) for name, row in MISSED if not reason_of(name, row) and not row.profile]


def test_what_misses_its_limit_is_told_with_reason_and_profile(results: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(REASONS, "nearest", {"nobody": "Never told", "faiss": "It has to wait"})
    page = performance_page(TEXT, results).text
    assert "5 rows have a limit; 3 keep to it. Those that do not:" in page
    told = "3.00 (2.00 to 4.00), ≤ 2.5 allowed. It has to wait. Where our time goes: `waiting` 75 %."
    assert f"- **search**, beside faiss: {told}\n" in page
    assert "- **latency**: 6 ms, ≤ 4 ms allowed.\n" in page
    assert "Never told" not in page


def test_rows_lines_and_what_is_missing_are_shown(results: Path):
    page = performance_page(TEXT, results).text
    assert "| fit | 2 s | laplace-torch | 2 s | 1.00 (0.50 to 1.50) | ≤ 1 | ✓ |\n" in page
    assert "| batches | 60,000 rows/s | FastAPI | 70,000 rows/s | 0.86 (0.86 to 0.86) | ≥ 50,000 rows/s | ✓ |" in page
    assert "| latency | 6 ms | – | – | – | ≤ 4 ms | ✗ |" in page
    assert "- fit: 0.1 apart." in page
    assert "| ours | 1.00 | 1.00 |" in page
    assert "**Not measured yet:** Approximate neighbours, Detectors, Intervals," in page
    assert (
        "Some CPU, 2 cores, device cpu; dapcal 1, python 1, torch 1, numpy 1; faiss-cpu 1.9. Commit abc; 3 runs" in page
    )


def test_figures_are_drawn_of_what_there_is(results: Path):
    write(results, results)
    assert {path.name for path in results.glob("*.png")} == {"performance-ratios.png", "performance-scaling.png"}
    assert all(path.stat().st_size > 1000 for path in results.glob("*.png"))
    written = (results / "performance.md").read_text(encoding="utf-8")
    assert written == performance_page(TEXT, results).text


def test_a_page_without_results_says_so(tmp_path: Path):
    text, drawings = performance_page(TEXT, tmp_path)
    assert drawings == []
    assert text.count(NOT_YET) == 8
    assert all(title in text for title, _ in TITLES.values())
    assert ".png" not in text


def test_ten_million_points_and_rows_are_shown(results: Path):
    (results / "neighbors.json").write_text(json.dumps({"large": INDEX}), encoding="utf-8")
    (results / "large-table.json").write_text(json.dumps(TABLE), encoding="utf-8")
    page = performance_page(TEXT, results).text
    assert "for 96.1 %, and 99 % of the distances are at most 1.2 % too large; none is too small" in page
    assert "| built | 12.50 | 20.00 | 0.25 |\n| 10,000 queries, exactly | 12.50 |" in page
    assert "4.2 GB of anonymous memory at its peak (4 allowed, ✗), 30 minutes; the model takes 12.3 MB." in page
    assert (
        "in features half are at most 12.5 % and 99 % at most 50.0 % larger. d0 is above 0 for 10.0 % (to all" in page
    )


def test_ten_million_may_be_measured_in_part(results: Path):
    (results / "neighbors.json").write_text(json.dumps({"sizes": []}), encoding="utf-8")
    (results / "large-table.json").write_text(json.dumps(TABLE | {"gigabytes": 2.0}), encoding="utf-8")
    page = performance_page(TEXT, results).text
    assert "An index of ten million points: Not measured yet. `python benchmarks/neighbors.py large` measures" in page
    assert "(4 allowed, ✓)" in page


def test_passes_on_a_gpu_stand_beside_those_of_the_posterior(results: Path):
    assert "WideResNet-28-10 on a GPU: Not measured yet." in performance_page(TEXT, results).text
    found = {
        "environment": {"device": "NVIDIA H200"}, "images": 10_000, "training_images": 49_000,
        "calibrate_seconds": 12.34, "passes_of_training_images_seconds": 2.5,
        "rows": {
            "500": {"network": [1.0, 1.0], "posterior": [2.0, 2.0], "calibrated": [2.0, 2.1]},
            "100": {"network": [1.0, 1.0], "posterior": [2.0, 4.0], "calibrated": [3.0, 6.0]},
        },
    }  # fmt: skip
    (results / "gpu.json").write_text(json.dumps(found), encoding="utf-8")
    page = performance_page(TEXT, results).text
    assert "| 500 | 1.000 | 2.000 | 2.050 | 1.02 (1.00 to 1.05) ✓ |" in page
    assert "| 100 | 1.000 | 3.000 | 4.500 | 1.50 (1.50 to 1.50) ✗ |" in page
    assert "`calibrate` took 12.3 s; one pass over its images takes 2.5 s" in page
