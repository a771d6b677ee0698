"""Means, standard errors and medians over gap splits and seeds, and differences to the posterior alone."""

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

    A data set with constant columns, whose splits are arbitrary, also appears without them. Errors are over splits
    where there is one seed; else over seeds, of their means over splits.

    Args:
        records: one for each split and seed, with "table", "seed" (older ones without), "constant" (whether its column
            is constant) and "rows".
    """
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        parts.setdefault(record["table"], []).append(record)
    for table, own in list(parts.items()):
        if any(record["constant"] for record in own):
            parts[f"{table}, without constant columns"] = [record for record in own if not record["constant"]]
    return {name: _over_records(own) for name, own in parts.items()}


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


def _over_records(records: Sequence[Mapping[str, Any]]) -> Summary:
    splits = [record["rows"] for record in records]
    seeds = [record.get("seed", 0) for record in records]
    summary: Summary = {}
    for row in splits[0]:
        known = [metric for metric in METRICS if all(metric in split[row] for split in splits)]
        summary[row] = {"splits": len(splits) // len(set(seeds))} | {
            metric: _over_seeds([split[row][metric] for split in splits], seeds) for metric in known
        }
        if base_of(row) != row:
            gains = [split[row]["log_likelihood"] - split[base_of(row)]["log_likelihood"] for split in splits]
            summary[row]["log_likelihood_gain"] = _over_seeds(gains, seeds)
    return summary


def _over_seeds(values: Sequence[float], seeds: Sequence[int]) -> dict[str, float]:
    """As `spread` of one seed; of several mean and error of the seeds' means, and the median of all values."""
    by_seed: dict[int, list[float]] = {}
    for seed, value in zip(seeds, values, strict=True):
        by_seed.setdefault(seed, []).append(value)
    if len(by_seed) == 1:
        return spread(values)
    return spread([statistics.fmean(own) for own in by_seed.values()]) | {"median": statistics.median(values)}
