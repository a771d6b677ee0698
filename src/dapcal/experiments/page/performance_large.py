"""Ten million training points, a table of as many rows, three nodes, a GPU: results of scripts of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from dapcal.experiments.page.cells import decimal, table
from dapcal.experiments.page.scale import nodes

MOST = 4.0  # GB of anonymous memory that fitting a table may take
MOST_ON_GPU = 1.1  # times the passes of the posterior alone
_STEPS = {  # of the file: its words
    "build": "built",
    "approximate_10000": "10,000 queries, approximately",
    "approximate_1": "one query, approximately",
    "exact_10000": "10,000 queries, exactly",
    "exact_1": "one query, exactly",
    "save": "saved",
    "load": "loaded",
}
_COMMANDS = {
    "neighbors": "python benchmarks/neighbors.py large",
    "large-table": "python benchmarks/large_table.py --out results/large-table.json",
    "ray": "python benchmarks/ray_predict.py",
    "gpu": "python benchmarks/gpu_passes.py --out results/gpu.json",
}


def large(folder: Path) -> str:
    """Paragraphs and a table of what is there; of what is not the command that measures it."""
    index = (_found(folder, "neighbors") or {}).get("large")
    fitted, ray, gpu = (_found(folder, name) for name in ("large-table", "ray", "gpu"))
    return "\n\n".join(
        [
            _index(index) if index else _not_yet("An index of ten million points", "neighbors"),
            _fitted(fitted) if fitted else _not_yet("A table of ten million rows", "large-table"),
            f"**Three nodes of one CPU.** {nodes(ray)}" if ray else _not_yet("Rows on three nodes", "ray"),
            _on_gpu(gpu) if gpu else _not_yet("WideResNet-28-10 on a GPU", "gpu"),
        ]
    )


def _found(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _not_yet(what: str, name: str) -> str:
    return f"{what}: Not measured yet. `{_COMMANDS[name]}` measures it."


def _index(found: Mapping[str, Any]) -> str:
    words = (
        f"**{found['points']:,} points of {found['dimension']} numbers** ({found['gigabytes']:.3g} GB in a mapped "
        f"file): {found['note']}. Of the queries below the nearest point is found for "
        f"{100 * found['recall']:.1f} %, and 99 % of the distances are at most {100 * found['excess_99']:.2g} % too "
        f"large; {'none is' if found['never_too_small'] else 'SOME ARE'} too small. The artefact takes "
        f"{found['file_gigabytes']:.3g} GB, and answers {'the same' if found['same_after_loading'] else 'OTHERWISE'} "
        f"once it is loaded."
    )
    cells = [
        [
            words_of,
            decimal(found[step]["seconds"], 2),
            decimal(found[step]["processor_seconds"], 2),
            decimal(found[step]["anonymous_gigabytes_peak"], 2),
        ]
        for step, words_of in _STEPS.items()
        if step in found
    ]
    head = ["", "seconds", "of the processor", "anonymous memory at its peak, beyond what was there, GB"]
    return f"{words}\n\n{table(head, cells)}"


def _fitted(found: Mapping[str, Any]) -> str:
    mark = "✓" if found["gigabytes"] <= MOST else "✗"
    return (
        f"**`dapcal fit` of {found['rows']:,} rows × {found['columns']}:** {found['gigabytes']:.3g} GB of anonymous "
        f"memory at its peak ({MOST:g} allowed, {mark}), {found['seconds'] / 60:.0f} minutes; the model takes "
        f"{found['model_megabytes']:.3g} MB. At new rows its error is {found['rmse_all_rows']:.3f}, with the sample "
        f"alone {found['rmse_sample']:.3f}.{_distances(found['distances']) if 'distances' in found else ''}"
    )


def _distances(found: Mapping[str, Any]) -> str:
    """What distances from the sample are beside those from all rows."""
    beyond, mean = found["beyond_radius"], found["mean_d0"]
    spaces = ", ".join(
        f"{name} half are at most {decimal(100 * half, 1)} % and 99 % at most {decimal(100 * most, 1)} % larger"
        for name, (half, most) in found["too_large"].items()
    )
    return (
        f" Distances of {found['new_rows']:,} new rows are those to the sample; beside those to all rows, in {spaces}. "
        f"d0 is above 0 for {100 * beyond['sample']:.1f} % (to all rows, with the same radius: "
        f"{100 * beyond['all_rows']:.1f} %), its mean {mean['sample']:.3g} ({mean['all_rows']:.3g})."
    )


def _on_gpu(found: Mapping[str, Any]) -> str:
    """A network's passes, those of its posterior, and with distances."""
    cells = []
    for size, ways in found["rows"].items():
        ratios = [ours / alone for ours, alone in zip(ways["calibrated"], ways["posterior"], strict=True)]
        middle = median(ratios)
        mark = "✓" if middle <= MOST_ON_GPU else "✗"
        seconds = [decimal(median(ways[way]), 3) for way in ("network", "posterior", "calibrated")]
        cells.append([size, *seconds, f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) {mark}"])
    words = (
        f"**WideResNet-28-10 on one {found['environment']['device']}**, {found['images']:,} images of CIFAR-10, last "
        f"layer by Laplace, distances to the features of {found['training_images']:,} training images. Seconds of all "
        f"images, and what distance multiplies the posterior's own by ({MOST_ON_GPU:g} allowed). `calibrate` took "
        f"{found['calibrate_seconds']:.3g} s; one pass over its images takes "
        f"{found['passes_of_training_images_seconds']:.3g} s."
    )
    head = ["images a batch", "network alone", "posterior", "with distances", "ratio"]
    return f"{words}\n\n{table(head, cells)}"
