"""Means, standard errors and medians over gap splits, and differences to the posterior alone, from records alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

METRICS = (
    "log_likelihood", "log_likelihood_mixture", "log_likelihood_normalised", "log_likelihood_without_weight",
    "log10_total_weight_median", "ess_median", "rmse", "crps", "coverage", "width", "held_out_log_likelihood", "phi",
)  # fmt: skip
Summary = dict[str, dict[str, Any]]


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, Summary]:
    """For every data set and row: each metric over its splits, and paired differences to the row's posterior alone.

    A data set with constant columns, whose splits are arbitrary, also appears without them.

    Args:
        records: one for each split, with "table", "constant" (whether its column is constant) and "rows".
    """
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        parts.setdefault(record["table"], []).append(record)
    for table, own in list(parts.items()):
        if any(record["constant"] for record in own):
            parts[f"{table}, without constant columns"] = [record for record in own if not record["constant"]]
    return {name: _over_splits([record["rows"] for record in own]) for name, own in parts.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, its standard error, and median.

    >>> spread([1.0, 2.0, 3.0, 10.0])
    {'mean': 4.0, 'error': 2.04..., 'median': 2.5}
    """
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return {"mean": statistics.fmean(values), "error": error, "median": statistics.median(values)}


def base_of(row: str) -> str:
    """The posterior that a row adjusts.

    >>> base_of("VI + ours")
    'VI'
    """
    return row.partition(" + ")[0]


def _over_splits(splits: Sequence[Mapping[str, Mapping[str, Any]]]) -> Summary:
    summary: Summary = {}
    for row in splits[0]:
        known = [metric for metric in METRICS if all(metric in split[row] for split in splits)]
        summary[row] = {"splits": len(splits)} | {
            metric: spread([split[row][metric] for split in splits]) for metric in known
        }
        if base_of(row) != row:
            gains = [split[row]["log_likelihood"] - split[base_of(row)]["log_likelihood"] for split in splits]
            summary[row]["log_likelihood_gain"] = spread(gains)
    return summary
