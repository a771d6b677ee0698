"""The results page: cells by hand, files merged or absent, and every number from a file."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from dapcal.experiments.gap.evaluation import HARDEST
from dapcal.experiments.images.methods import methods
from dapcal.experiments.page import drawings
from dapcal.experiments.page.cells import Number, beside, decimal, mark, number, power, show, table
from dapcal.experiments.page.files import read_gap, read_images
from dapcal.experiments.page.markers import replaced
from dapcal.experiments.page.results import results_page, write
from dapcal.experiments.published import IMAGES, PHI, UCI_GAP

SETS = ("MNIST", "SVHN")
SCORES = {
    "MAP": ("entropy",), "DDU": ("score",), "VI": ("entropy",), "DAP, paper's": ("confidence", "distance"),
    "DAP, ours": ("OOD score", "entropy", "distance"), "energy": ("score",), "SNGP": ("score",),
}  # fmt: skip
PARTS = {"DAP, ours": "ours", "energy": "newer", "SNGP": "trained"}


def row(name: str, seed: int, curves: bool) -> dict[str, Any]:
    """Numbers that differ by row and seed."""
    start = 0.5 + 0.05 * list(SCORES).index(name) + 0.02 * seed
    found: dict[str, Any] = {
        "facts": {"phi": -3.0 - seed} if "DAP" in name else {},
        "ood": {
            score: {far: {"auroc": start + 0.1 * i, "aucpr": start, "fpr95": 1 - start} for i, far in enumerate(SETS)}
            for score in SCORES[name]
        },
    }
    if name not in ("DDU", "energy"):
        found["test"] = {
            "accuracy": 0.9 + 0.02 * seed, "nll": start, "brier": 0.2, "ece": 0.03, "adaptive_ece": 0.02,
            "selective_risk": 0.01,
        }  # fmt: skip
    if name == "DAP, paper's":
        quantiles = {"total weight": [0.0, 10.0 ** (-6 - 4 * seed), 1.0], "ESS": [1.0, 1.5 + seed, 9.0]}
        found["weights"] = dict.fromkeys(("test", *SETS), quantiles)
    if curves:
        bars = {"bars": [1, 2, 3], "roc": [[0.0, 0.5, 1.0]] * 2, "precision_recall": [[0.1 * i for i in range(9)]] * 2}
        found["curves"] = {
            score: {"limits": [0.0, 1.0], "test": [3, 2, 1], **dict.fromkeys(SETS, bars)} for score in SCORES[name]
        }
        if "test" in found:
            found["curves"] |= {"reliability": [[0.5, None], [0.6, None], [50, 0]], "selective": [[0.5, 1.0]] * 2}
        if "DAP" in name:
            found["curves"]["distances"] = {"limits": [0.0, 2.0], "right": [5, 3, 1], "wrong": [1, 1, 0]}
            found["facts"]["curve"] = {
                "phi": [-9.0, 0.0, 9.0], "loss": [0.4, 0.2, 0.1], "held_out_nll": [0.3, 0.4, None],
                "uncalibrated_loss": 0.4, "uncalibrated_nll": 0.3,
            }  # fmt: skip
    return found


def images(seeds: tuple[int, ...] = (0, 1), names: tuple[str, ...] = tuple(SCORES), device: str = "GPU") -> dict:
    return {
        "experiment": "fashion-mnist", "seeds": list(seeds), "environment": {"torch": "2.9", "device": device},
        "settings": {
            "inside": "Fashion-MNIST", "outside": list(SETS), "network": "LeNet.", "epochs": 80, "batch_size": 512,
            "learning_rate": 1e-3, "variational_rate": 3e-3, "draws": 50, "members": 5, "held_out": 1000,
        },
        "parts": {name: PARTS.get(name, "paper") for name in names},
        "main_scores": {name: SCORES[name][0] for name in names},
        "runs": [{"seed": s, "rows": {name: row(name, s, s == seeds[0]) for name in names}} for s in seeds],
    }  # fmt: skip


def gap() -> dict:
    rows = ("MAP", "VI", "VI + paper", "VI + ours", "ensemble", "ensemble + ours", "Laplace", "Laplace + ours")

    def record(name: str, split: int) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = {}
        for place, row in enumerate(rows):
            found[row] = {
                "log_likelihood": -3.0 + 0.25 * place - 0.25 * split, "log_likelihood_mixture": -5.0, "rmse": 1.0,
                "crps": 0.5, "coverage": 0.9, "width": 4.0, "held_out_log_likelihood": -2.0, "learning_rate": 0.01,
                "epochs": 20,
            }  # fmt: skip
        found["VI + paper"] |= {
            "log_likelihood_normalised": -7.0, "log_likelihood_without_weight": -8.0, "phi": 15.0 - 30 * split,
            "log10_total_weight_median": -100.0 * split, "ess_median": 50.0,
        }  # fmt: skip
        return {"table": name, "split": split, "constant": name == "naval" and split == 1, "rows": found}

    return {
        "experiment": "uci-gap", "seed": 0, "environment": {"torch": "2.9", "device": "cpu"},
        "settings": {
            "network": "D-50-50-1 ReLU", "learning_rates": [0.01, 1e-4], "paper_learning_rates": [0.01],
            "epochs": [20, 40], "held_out": 0.1, "draws": 100, "members": 5,
        },
        "splits": [record(name, split) for name in ("boston", "naval") for split in range(3)],
    }  # fmt: skip


def folder(path: Path, **files: dict) -> Path:
    """Result files, by name with underscores."""
    path.mkdir(exist_ok=True)
    for name, data in files.items():
        (path / f"{name.replace('_', '-')}.json").write_text(json.dumps(data), encoding="utf-8")
    return path


def line(text: str, first: str, after: str = "# Results") -> list[str]:
    """Cells of the first table row with that label after a heading."""
    lines = text.split(after)[1].splitlines()
    return next(cells for cells in ([c.strip() for c in one.split("|")[1:-1]] for one in lines) if cells[:1] == [first])


def test_numbers_by_hand():
    assert number([0.92, 0.94, 0.99], 100) == pytest.approx((95.0, 100 * math.sqrt(0.0013) / math.sqrt(3)))
    assert number([]) is None
    assert show(None) == "–"
    assert show(number([0.5, None])) == "not finite"
    assert show(number([0.5]), 2) == "0.50"
    assert show(Number(-1582.4, 323.9)) == "−1582 ± 324"
    assert show(Number(-0.9834, 0.0201)) == "−0.983 ± 0.020"
    assert show(Number(0.00231, 0.000063)) == "0.0023 ± 0.0001"
    assert decimal(-0.001, 2) == "0.00"
    assert decimal(0.5, 1, sign=True) == "+0.5"
    assert power(1.8e-42) == "2·10⁻⁴²"


@pytest.mark.parametrize(
    ("difference", "error", "expected"),
    [(2.1, 0.5, " ▲"), (-2.1, 1.0, " ▼"), (2.1, 1.1, ""), (1.9, 0.1, ""), (-2.1, math.nan, " ▼"), (math.nan, 1.0, "")],
)
def test_a_mark_needs_both_two_points_and_two_errors(difference, error, expected):
    assert mark(difference, error, least=2.0) == expected


def test_the_papers_number_stands_beside_ours():
    assert beside(Number(94.23, 0.08), 94.35, 1) == "94.2 ± 0.1 (94.35)"
    assert beside(Number(86.1, 3.3), 70.31, 1) == "86.1 ± 3.3 (70.31) ▲"
    assert beside(Number(86.1, 3.3), None, 1) == "86.1 ± 3.3"
    assert beside(None, 70.31, 1) == "–"


def test_a_table_of_uneven_rows_is_refused():
    with pytest.raises(ValueError, match="one for each column"):
        table(["", "a"], [["row", "1", "2"]])


def test_image_cells(tmp_path: Path):
    text = results_page(folder(tmp_path, fashion_mnist=images())).text
    # MAP: accuracy 0.90 and 0.92, AUROC on MNIST 0.50 and 0.52; published 89.39, 67.65 and 67.49
    cells = line(text, "MAP", "<summary>The paper's table")
    assert cells[1:4] == ["91.0 ± 1.0 (89.39)", "51.0 ± 1.0 (67.65) ▼", "51.0 ± 1.0 (67.49) ▼"]
    assert cells[4] == "61.0 ± 1.0"  # the paper has no SVHN here
    assert line(text, "DAP, paper's", "<summary>The paper's table")[-1] == "−3.50 ± 0.50 (−10.45)"
    assert line(text, "DAP, ours: entropy", "<summary>The paper's table")[-1] == "−3.50 ± 0.50"
    # numbers with a published one: accuracy, AUROC and AUCPR of MAP, VI and DAP, two of DDU; within: the accuracies
    assert "Of 11 numbers that it has, 3 are within" in text
    assert line(text, "DAP, ours: OOD score", "<summary>Every score")[1:3] == ["71.0 ± 1.0", "29.0 ± 1.0"]
    assert line(text, "DAP, ours: p-value", "<summary>Every score")[1:3] == ["–", "–"]
    assert line(text, "VI", "<summary>Predictions")[1:3] == ["91.0 ± 1.0", "0.610 ± 0.010"]
    assert line(text, "DAP, paper's", "<summary>Importance weights")[1:3] == ["5·10⁻⁷", "2"]
    assert line(text, "energy", "<summary>Newer scores")[1:] == [
        "–", "76.0 ± 1.0", "86.0 ± 1.0", "24.0 ± 1.0", "24.0 ± 1.0", "–", "–", "2",
    ]  # fmt: skip
    assert "<summary>The paper's open questions" not in text


def test_a_method_without_some_seeds_says_how_many(tmp_path: Path):
    data = images()
    del data["runs"][1]["rows"]["SNGP"]
    cells = line(results_page(folder(tmp_path, fashion_mnist=data)).text, "SNGP", "<summary>Networks trained")
    assert cells[2] == "80.0"
    assert cells[-1] == "1"


def test_gap_cells(tmp_path: Path):
    text = results_page(folder(tmp_path, uci_gap=gap())).text
    # log-likelihoods −2.5, −2.75, −3.0 of "VI + paper": error 0.25/√3, with the paper's 0.19 together 0.24
    assert line(text, "VI + paper", "<summary>Test log-likelihood")[1] == "−2.75 ± 0.14 (−3.14 ± 0.19)"
    assert line(text, "MAP", "<summary>Test log-likelihood")[1] == "−3.25 ± 0.14 (−4.09 ± 0.52)"
    assert line(text, "VI", "<summary>Test log-likelihood")[2] == "−3.00 ± 0.14 (−144.71 ± 23.36) ▲"
    assert line(text, "VI", "<summary>Test log-likelihood")[3] == "−3.00 ± 0.25"  # naval without its constant column
    assert line(text, "VI + ours", "<summary>Differences")[1] == "+0.500 ± 0.000, +0.50 ▲"
    assert line(text, "boston: VI + paper", "<summary>The paper's estimator")[1:] == [
        "−3.00 ± 0.14", "−2.75 ± 0.14", "−5.00 ± 0.00", "−7.00 ± 0.00", "−8.00 ± 0.00", "−100.0 (−200.0 to 0.0)", "50",
        "−15.0 (−45.0 to 15.0)",
    ]  # fmt: skip
    assert line(text, "VI", "<summary>95 % intervals")[1] == "90.0 ± 0.0; 4.00 ± 0.00"
    assert "“No network”" not in text
    assert "“Untuned”" not in text


def test_of_several_seeds_the_gap_has_errors_over_seeds(tmp_path: Path):
    data = gap()
    del data["seed"]
    data["seeds"] = [0, 1]
    data["splits"] = [copy.deepcopy(one) | {"seed": seed} for seed in (0, 1) for one in data["splits"]]
    for one in data["splits"][6:]:
        one["rows"]["VI"]["log_likelihood"] += 1.0
    text = results_page(folder(tmp_path, uci_gap=data)).text
    assert line(text, "uci-gap")[2] == "0, 1"
    assert "Errors are over 2 seeds, of their means over the splits." in text
    # means over splits −3 and −2: error 0.5
    assert line(text, "VI", "<summary>Test log-likelihood")[1] == "−2.50 ± 0.50 (−3.18 ± 0.19)"
    assert "boston (3 splits)" in text


def test_gap_rows_that_need_words_get_them(tmp_path: Path):
    data = gap()
    data["settings"]["untuned_learning_rate"] = 0.01
    for record in data["splits"]:
        rows = record["rows"]
        rows["no network"] = rows["VI from scratch"] = rows["MAP"]
        rows["VI, untuned"] = {**rows["VI"], "epochs": 40 if record["split"] else 20}
    text = results_page(folder(tmp_path, uci_gap=data)).text
    assert "“No network” is N(training mean, training variance)" in text
    assert "they choose the same on these splits: boston 1 of 3, naval 1 of 3." in text
    assert line(text, "VI, untuned", "<summary>Test log-likelihood")[1] == "−3.00 ± 0.14 (−3.18 ± 0.19)"


def test_files_of_an_experiment_are_merged_by_row(tmp_path: Path):
    other = images(seeds=(7,), names=("VI", "DAP, ours", "energy", "SNGP"), device="cpu")
    other["settings"]["epochs"] = 40
    main = images(names=("MAP", "VI", "DAP, ours"))
    text = results_page(folder(tmp_path, fashion_mnist=main, fashion_mnist_more=other)).text
    assert line(text, "VI", "<summary>The paper's table")[2] == "61.0 ± 1.0 (70.31) ▼"  # seeds 0 and 1, never 7
    newer = "<summary>Newer scores"
    assert line(text, "energy", newer)[2] == "89.0"
    assert line(text, "*VI*", newer)[2] == "74.0"  # that of the same run
    assert line(text, "SNGP †", "<summary>Predictions")[1] == "104.0"  # marked as of another run
    assert "seed 7; torch 2.9, cpu; epochs 40 in place of 80" in text
    assert line(text, "fashion-mnist")[1:] == ["`fashion-mnist.json`", "0, 1", "not recorded", "GPU; torch 2.9"]
    main["environment"]["commit"] = "0123456789ab, changed"
    text = results_page(folder(tmp_path, fashion_mnist=main)).text
    assert line(text, "fashion-mnist")[3:] == ["0123456789ab, changed", "GPU; torch 2.9"]


def test_with_as_many_seeds_the_file_named_after_the_experiment_comes_first(tmp_path: Path):
    results = read_images(folder(tmp_path, fashion_mnist=images(), fashion_mnist_a=images((2, 3))), "fashion-mnist")
    assert results is not None
    assert [source.name for source in results.sources] == ["fashion-mnist.json", "fashion-mnist-a.json"]


def test_files_of_other_data_sets_are_refused(tmp_path: Path):
    other = images()
    other["settings"]["outside"] = ["MNIST"]
    with pytest.raises(ValueError, match=r"same data sets.*remove one"):
        results_page(folder(tmp_path, fashion_mnist=images(), fashion_mnist_more=other))


def test_two_gap_files_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="remove all but one"):
        read_gap(folder(tmp_path, uci_gap=gap(), uci_gap_old=gap()))


@pytest.mark.parametrize(
    "files",
    [{}, {"uci_gap": gap()}, {"fashion_mnist": images()}, {"toy": {"experiment": "toy"}}, {"torture": {"kind": {}}}],
)
def test_absent_files_leave_their_sections_out(files, tmp_path: Path):
    page = results_page(folder(tmp_path, **files))
    assert ("## UCI gap" in page.text) == ("uci_gap" in files)
    assert ("## Fashion-MNIST" in page.text) == ("fashion_mnist" in files)
    assert "## MNIST" not in page.text
    assert "<summary>How to read it</summary>" in page.text


def leaves(data: Any, path: tuple = ()) -> list[tuple]:
    """Paths to all numbers."""
    if isinstance(data, dict):
        return [leaf for name, inner in data.items() for leaf in leaves(inner, (*path, name))]
    if isinstance(data, list):
        return [leaf for place, inner in enumerate(data) for leaf in leaves(inner, (*path, place))]
    return [path] if isinstance(data, int | float) and not isinstance(data, bool) else []


def changed(data: dict, path: tuple) -> dict:
    data = copy.deepcopy(data)
    inner: Any = data
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] += 1000
    return data


def test_every_image_number_is_on_the_page(tmp_path: Path):
    """The exceptions: AUCPR, which the paper's table alone has, outer quantiles of weights, and curves."""
    data = images()
    before = results_page(folder(tmp_path, fashion_mnist=data)).text
    hidden = {"seed", "aucpr", 0, 2}
    shown = [
        path for path in leaves(data["runs"]) if path[-1] not in hidden and not {"curve", "curves"}.intersection(path)
    ]
    assert len(shown) > 100
    for path in shown:
        after = results_page(folder(tmp_path, fashion_mnist=changed(data, ("runs", *path)))).text
        assert after != before, path


def test_every_gap_number_is_on_the_page(tmp_path: Path):
    data = gap()
    before = results_page(folder(tmp_path, uci_gap=data)).text
    hidden = ("split", "held_out_log_likelihood", "learning_rate", "epochs")
    for path in leaves(data["splits"][:3]):
        if path[-1] in hidden or (path[-1] == "log_likelihood_mixture" and path[2] != "VI + paper"):
            continue
        after = results_page(folder(tmp_path, uci_gap=changed(data, ("splits", *path)))).text
        assert after != before, path


def test_figures_are_written_and_writing_again_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drawings, "DPI", 30)
    results, docs = folder(tmp_path / "results", fashion_mnist=images(), uci_gap=gap()), tmp_path / "docs"
    docs.mkdir()
    (docs / "results-of-old.png").touch()
    write(results, docs)
    first = {path.name: path.read_bytes() for path in docs.iterdir()}
    figures = ("detection", "scores", "predictions", "calibration")
    expected = {"results.md", "results-uci-gap-likelihood.png", "results-uci-gap-gains.png"}
    expected |= {"results-ranks-one-network.png", "results-opening.png"}
    assert set(first) == expected | {f"results-fashion-mnist-{name}.png" for name in figures}
    for name, content in first.items():
        if name.endswith("png"):
            assert content.startswith(b"\x89PNG")
            assert f"]({name})" in first["results.md"].decode()
    write(results, docs)
    assert {path.name: path.read_bytes() for path in docs.iterdir()} == first


def test_captions_have_two_sentences(tmp_path: Path):
    for drawing in results_page(folder(tmp_path, fashion_mnist=images(), uci_gap=gap())).drawings:
        assert drawing.caption.count(". ") == 1, drawing.name
        assert drawing.caption.endswith(".")


def test_details_are_folded_and_every_fold_is_closed_before_the_next(tmp_path: Path):
    text = results_page(folder(tmp_path, fashion_mnist=images(), uci_gap=gap())).text
    marks = re.findall(r"^(?:## |### |<details|</details>)", text, re.M)
    assert "### " not in marks
    assert marks[0] == "## "  # picture and table stand before all headings, and open
    opened = False
    for found in marks:
        assert opened == (found == "</details>")
        opened = found == "<details"
    assert not opened
    above = text.split("\n## ")[0]
    assert above.startswith("# Results\n\n![")
    assert above.count("![") == 1
    assert len(re.findall(r"^\| ---", above, re.M)) == 1


def test_published_rows_are_rows_of_ours():
    assert set(IMAGES) < set(PHI)
    for rows in IMAGES.values():
        paper = {name for name, method in methods(()).items() if method.part == "paper"}
        assert set(rows) == paper
    assert all(set(rows) == {"MAP", "VI", "VI + paper"} for rows in UCI_GAP.values())
    assert HARDEST == 0.3  # as the page says


@pytest.mark.parametrize("text", ["", "BEGIN", "END BEGIN", "BEGIN END BEGIN END"])
def test_a_page_without_its_comments_is_refused(text: str):
    with pytest.raises(ValueError, match=r"Expected BEGIN once in the page and END after it, got \d; mend"):
        replaced(text, "BEGIN", "END", "new")


def test_what_is_between_comments_is_replaced_up_to_the_first_end():
    once = replaced("END a BEGIN old END b END c", "BEGIN", "END", "new")
    assert once == "END a BEGIN\nnew\nEND b END c"
    assert replaced(once, "BEGIN", "END", "new") == once
