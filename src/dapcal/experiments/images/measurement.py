"""All that is measured of one method on images: accuracy and calibration inside, detection outside, curves of both."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dapcal import metrics
from dapcal.experiments.images.bench import Bench
from dapcal.experiments.images.methods import Answer, Fitted, Method
from dapcal.experiments.records import with_leaves
from dapcal.types import DapcalWarning

BATCH = 2000  # images at a time
BINS = 60


Keep = Callable[[dict[str, Answer]], None]
"""Takes what a method said of the test images ("test") and of those outside, by their names."""


def make_row(method: Method, bench: Bench, curves: bool, keep: Keep = lambda _: None) -> dict[str, Any]:
    """Fit a method and measure it; what it warned of and how long it took stands beside its numbers."""
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DapcalWarning)
        fitted = method.fit(bench)
        with torch.no_grad():
            numbers = measured(fitted, bench, curves, keep)
    said = sorted({str(w.message) for w in caught if issubclass(w.category, DapcalWarning)})
    return numbers | {"warnings": said, "seconds": round(time.perf_counter() - started, 1)}


def measured(fitted: Fitted, bench: Bench, curves: bool, keep: Keep = lambda _: None) -> dict[str, Any]:
    """All metrics of one row."""
    x, y = bench.test
    inside = _answers(fitted, x)
    outside = {name: _answers(fitted, images) for name, images in bench.outside.items()}
    keep({"test": inside, **outside})
    numbers: dict[str, Any] = {"facts": fitted.facts}
    if inside.log_probs is not None:
        numbers["test"] = _test(inside.log_probs, y)
    numbers["ood"] = {
        score: {name: _rounded(metrics.detection(s, far.scores[score])._asdict()) for name, far in outside.items()}
        for score, s in inside.scores.items()
    }
    if inside.weights:
        numbers["weights"] = {
            name: {kind: _quantiles(values) for kind, values in answer.weights.items()}
            for name, answer in {"test": inside, **outside}.items()
        }
    if curves:
        numbers["curves"] = _curves(inside, outside, y)
    return with_leaves(numbers, _plain)


def _answers(fitted: Fitted, x: Tensor) -> Answer:
    parts = [fitted.answer(batch) for batch in x.split(BATCH)]
    first = parts[0]
    return Answer(
        {name: torch.cat([part.scores[name] for part in parts]).double().cpu() for name in first.scores},
        None if first.log_probs is None else torch.cat([p.log_probs for p in parts if p.log_probs is not None]).cpu(),
        {name: torch.cat([part.weights[name] for part in parts]).double().cpu() for name in first.weights},
    )


def _test(log_probs: Tensor, y: Tensor) -> dict[str, float]:
    y = y.cpu()
    probs = log_probs.exp()
    wrong = (log_probs.argmax(-1) != y).double()
    return _rounded(
        {
            "accuracy": metrics.accuracy(log_probs, y),
            "nll": float(-log_probs.gather(-1, y[:, None]).mean()),
            "brier": metrics.brier(probs, y),
            "ece": metrics.expected_calibration_error(probs, y),
            "adaptive_ece": metrics.adaptive_calibration_error(probs, y),
            "selective_risk": metrics.selective_risk(-log_probs.max(-1).values, wrong).area,
        }
    )


def _curves(inside: Answer, outside: dict[str, Answer], y: Tensor) -> dict[str, Any]:
    """Points of curves and bars of histograms, for the figures."""
    found: dict[str, Any] = {}
    for score, values in inside.scores.items():
        if score in ("epistemic", "p-value"):
            continue
        limits = _limits(torch.cat([values, *(far.scores[score] for far in outside.values())]))
        found[score] = {
            "limits": limits,
            "test": _bars(values, limits),
            **{
                name: {
                    "bars": _bars(far.scores[score], limits),
                    "roc": _points(metrics.roc_curve(values, far.scores[score], 101)),
                    "precision_recall": _points(metrics.precision_recall_curve(values, far.scores[score], 101)),
                }
                for name, far in outside.items()
            },
        }
    if inside.log_probs is not None:
        y, probs = y.cpu(), inside.log_probs.exp()
        found["reliability"] = _points(metrics.reliability(probs, y))
        right = inside.log_probs.argmax(-1) == y
        found["selective"] = _points(metrics.selective_risk(-inside.log_probs.max(-1).values, 1 - right.double())[:2])
        if "distance" in inside.scores:
            distance = inside.scores["distance"]
            limits = [0.0, float(distance.quantile(0.999))]
            found["distances"] = {
                "limits": limits,
                "right": _bars(distance[right], limits),
                "wrong": _bars(distance[~right], limits),
            }
    return found


def _limits(values: Tensor) -> list[float]:
    finite = values[values.isfinite()]
    return [float(finite.quantile(q)) for q in (0.002, 0.998)]


def _bars(values: Tensor, limits: list[float]) -> list[int]:
    low, high = limits
    return torch.histc(values.clamp(low, high), BINS, low, high).long().tolist() if high > low else []


def _points(curve: Any) -> list[list[float]]:
    return [[round(float(v), 5) for v in values] for values in curve]


def _quantiles(values: Tensor) -> list[float]:
    return [float(f"{v:.5g}") for v in values.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=values.dtype)).tolist()]


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in numbers.items()}


def _plain(leaf: Any) -> Any:
    """As JSON has it: numbers for a tensor, null for what is not finite."""
    if isinstance(leaf, Tensor):
        return with_leaves(leaf.tolist(), _plain)
    return None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf
