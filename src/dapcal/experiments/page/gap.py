"""The section of the UCI gap experiment on the results page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from dapcal.experiments.gap.summary import base_of, summarise
from dapcal.experiments.page import gap_figures as figures
from dapcal.experiments.page.cells import DOWN, NOTHING, UP, Number, decimal, mark, marks, median, show, table
from dapcal.experiments.page.drawings import Drawing
from dapcal.experiments.page.files import GapResults
from dapcal.experiments.published import UCI_GAP

NEAREST = {
    "MAP": "MAP", "VI": "VI", "VI + paper": "VI + paper", "MAP, paper's grid": "MAP",
    "VI from scratch, paper's grid": "VI", "VI from scratch, paper's grid + paper": "VI + paper",
    "VI, untuned": "VI", "VI, untuned + paper": "VI + paper",
}  # fmt: skip
"""Rows that the paper's numbers are set beside, and which of them."""

Block = str | Drawing


def section(results: GapResults) -> list[Block]:
    """Text, tables and figures, in the order of the page."""
    summary = summarise(results.splits)
    blocks: list[Block] = ["## UCI gap", "### Setting", _setup(results), *_likelihood(summary)]
    blocks += figures.likelihood(summary)
    blocks += _gains(summary)
    blocks += figures.gains(results)
    blocks += _three_ways(results, summary)
    blocks += _predictions(summary)
    return blocks


def _setup(results: GapResults) -> str:
    settings = results.source.settings
    rates, epochs = (", ".join(f"{v:g}" for v in settings[name]) for name in ("learning_rates", "epochs"))
    papers = ", ".join(f"{rate:g}" for rate in settings["paper_learning_rates"])
    text = (
        "A split leaves out the middle third of the rows by one feature, and tests there; there are as many splits as "
        f"features. Networks are {settings['network']} with one noise level and a standard-normal prior. Of the rows "
        f"outside the gap, {100 * settings['held_out']:g} % are held out, and choose learning rate (of {rates}) and "
        f"epochs (of {epochs}) of every split and method by their log-likelihood; the gap chooses nothing. "
        f"{settings['draws']} draws, ensembles of {settings['members']}. VI starts from the MAP network, “from "
        f"scratch” it does not; “paper's grid” has the paper's learning rates alone ({papers})."
    )
    if len(results.source.seeds) > 1:
        text += f" Errors are over {len(results.source.seeds)} seeds, of their means over the splits."
    return text + _about_untuned(results, epochs.split()[-1])


def _about_untuned(results: GapResults, epochs: str) -> str:
    """What that row is, and how often held-out data choose the same."""
    found = {name: results.values(name, "VI, untuned", "learning_rate") for name in results.tables}
    if not any(found.values()):
        return ""
    counts = []
    for name, rates in found.items():
        chosen = zip(
            *(results.values(name, "VI from scratch", key) for key in ("learning_rate", "epochs")), strict=True
        )
        fixed = zip(rates, results.values(name, "VI, untuned", "epochs"), strict=True)
        counts.append(f"{name} {sum(a == b for a, b in zip(chosen, fixed, strict=True))} of {len(rates)}")
    return (
        f" “Untuned” is VI from scratch at a rate of {results.source.settings['untuned_learning_rate']:g} for {epochs} "
        f"epochs, whatever held-out data say; they choose the same on these splits: {', '.join(counts)}. Where they do "
        "not, it fits worse outside the gap: it shows how much the paper's estimator depends on the posterior, and is "
        "no result to choose by."
    )


def _likelihood(summary: dict[str, Any]) -> Iterable[Block]:
    rows = [
        [row, *(_beside(summary[name][row]["log_likelihood"], _published(name, row)) for name in summary)]
        for row in _rows(summary)
    ]
    compared, marked = marks(rows)
    yield "### Test log-likelihood in the gap"
    yield table(_head(summary), rows)
    yield (
        "Nats per row, in units of the target; of the Gaussian with the predictive mean and variance. In brackets: the "
        f"paper, beside all rows that may be its own. Of {compared} comparisons, {compared - marked} agree "
        "within two standard errors (of both, together). Splits of a data set share rows, so their errors are not "
        "those of independent repeats; and where errors are large (energy, naval) a mean hangs on few splits: see the "
        "medians of differences below."
    )
    if "no network" in _rows(summary):
        yield (
            "“No network” is N(training mean, training variance) at every input: a row below it has learnt nothing "
            "that helps in that gap."
        )


def _gains(summary: dict[str, Any]) -> Iterable[Block]:
    rows = []
    for row in _rows(summary):
        if base_of(row) != row:
            gains = [summary[name][row]["log_likelihood_gain"] for name in summary]
            rows.append([row, *(_gain(gain) for gain in gains)])
    yield "### Differences to the posterior alone"
    yield table(_head(summary), rows)
    yield (
        "Log-likelihood of a row less that of its own posterior without adjustment, split by split: mean ± standard "
        f"error, median. {UP} and {DOWN}: better or worse than the posterior alone by more than two standard errors."
    )


def _three_ways(results: GapResults, summary: dict[str, Any]) -> Iterable[Block]:
    ways = ("log_likelihood", "log_likelihood_mixture", "log_likelihood_normalised", "log_likelihood_without_weight")
    rows = []
    for name in results.tables:
        for row, found in summary[name].items():
            if "log_likelihood_normalised" in found:
                weight, ess, phi = (
                    results.values(name, row, m) for m in ("log10_total_weight_median", "ess_median", "phi")
                )
                rows.append([
                    f"{name}: {row}", _cell(summary[name][base_of(row)]["log_likelihood"]),
                    *(_cell(found[way]) for way in ways),
                    _median_and_range(weight, 1), _median_and_range(ess, 0), _median_and_range(phi, 1),
                ])  # fmt: skip
    head = [
        "", "posterior alone", "moments", "mixture", "self-normalised", "no weight left", "log₁₀ W", "ESS", "φ",
    ]  # fmt: skip
    yield "### The paper's estimator, three ways"
    yield table(head, rows)
    yield (
        "The same weights, read as the Gaussian of unnormalised moments (as in the tables above), as the literal "
        "mixture of densities, whose total is W, and as the mixture's moments with weights that are made to sum to "
        "one. “No weight left” is what the first becomes when all weights vanish: N(training mean, noise²) at every "
        "input, which no longer depends on the network. log₁₀ W and ESS "
        f"(of {results.source.settings['draws']} draws) are medians over test rows; they and φ are given as median "
        "(lowest to highest) over splits. A φ far below or above all others is an edge of the search: no effect at "
        "all, or the limit of an infinitely wide prior."
    )


def _predictions(summary: dict[str, Any]) -> Iterable[Block]:
    for title, metrics in (
        ("95 % intervals: coverage in per cent; width", (("coverage", 100.0), ("width", 1.0))),
        ("CRPS; RMSE", (("crps", 1.0), ("rmse", 1.0))),
    ):
        rows = [
            [row, *("; ".join(_cell(summary[name][row][m], scale) for m, scale in metrics) for name in summary)]
            for row in _rows(summary)
        ]
        yield f"### {title}"
        yield table(_head(summary), rows)
    yield "Width, CRPS (of the moments' Gaussian) and RMSE in units of the target; lower is better for the last two."


def _rows(summary: dict[str, Any]) -> list[str]:
    return list(next(iter(summary.values())))


def _head(summary: dict[str, Any]) -> list[str]:
    return ["", *(f"{name} ({next(iter(rows.values()))['splits']} splits)" for name, rows in summary.items())]


def _published(name: str, row: str) -> Number | None:
    found = UCI_GAP.get(name, {}).get(NEAREST.get(row, ""))
    return Number(*found) if found else None


def _beside(ours: dict[str, float], paper: Number | None) -> str:
    if paper is None:
        return _cell(ours)
    error = math.hypot(ours["error"], paper.error)
    known = f"{paper.mean:g} ± {paper.error:g}".replace("-", "−")  # as it was published
    return f"{_cell(ours)} ({known}){mark(ours['mean'] - paper.mean, error)}"


def _gain(found: dict[str, float]) -> str:
    shown = show(Number(found["mean"], found["error"]), sign=True)
    digits = 0 if abs(found["median"]) >= 10 else 2
    return f"{shown}, {decimal(found['median'], digits, sign=True)}{mark(found['mean'], found['error'])}"


def _cell(found: dict[str, float], scale: float = 1.0) -> str:
    return show(Number(scale * found["mean"], scale * found["error"]))


def _median_and_range(values: list[float], digits: int) -> str:
    if not values:
        return NOTHING
    low, middle, high = (decimal(v, digits) for v in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})" if low != high else middle
