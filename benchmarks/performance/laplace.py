"""Last-layer Laplace beside laplace-torch: fit, predict and memory."""

from __future__ import annotations

from laplace_last_layer import INPUTS, measured

from dapcal.experiments.performance import AS_FAST, Row
from performance.apart import PAGE

__all__ = ["rows"]

NAMES = {"fit s": ("fit", "s"), "predict s": ("probit predictions", "s"), "peak MiB": ("memory of both", "MiB")}


def rows(repeats: int, small: bool) -> list[Row]:
    inputs = INPUTS // 10 if small else INPUTS
    found = [(measured("dapcal", inputs), measured("laplace-torch", inputs)) for _ in range(repeats)]
    ours, theirs = found[0]
    apart = max(abs(a - b) for a, b in zip(ours["probabilities"], theirs["probabilities"], strict=True))
    return [
        Row(
            f"{name}, CNN of three layers, {inputs:,} images",
            unit,
            [max(one[key], PAGE) for one, _ in found],
            "laplace-torch",
            [max(other[key], PAGE) for _, other in found],
            AS_FAST,
            note=f"probabilities differ by at most {apart:.4f}",
        )
        for key, (name, unit) in NAMES.items()
    ]
