"""docs/scale.md, its tables and its estimate, made from what benchmarks/scale.py and benchmarks/ray_predict.py wrote.

Run: python -m dapcal.experiments.page.scale results docs/scale.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dapcal.experiments.page.cells import power, table
from dapcal.experiments.page.markers import TABLE_END, replaced, table_begin
from dapcal.files import write_text

MACHINES, CORES, GIB = 32, 64, 512  # EC2 m7i.32xlarge: 128 vCPUs are 64 cores
ROWS, POINTS = 10**9, 10**8
BUSY = 0.5  # load average from which others used a machine
MOST = 1.15  # times the seconds of one process with the same cores that the engine may take
ROOM = 0.8  # of a machine's memory that models may take
_NAMES = {
    "rows": "rows",
    "training_points": "training points",
    "dimensions": "dimensions (columns)",
    "draws": "draws (members)",
    "classes": "classes",
}


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What was measured on one core, and on three nodes; None where that was not run yet."""
    scale, ray = (folder / f"{name}.json" for name in ("scale", "ray"))
    nodes = json.loads(ray.read_text(encoding="utf-8")) if ray.exists() else None
    return json.loads(scale.read_text(encoding="utf-8")), nodes


def scale_page(text: str, folder: Path) -> str:
    """The page with its tables made anew."""
    scale, ray = read(folder)
    for name, content in (("slopes", _slopes(scale)), ("nodes", nodes(ray)), ("estimate", _estimate(scale))):
        text = replaced(text, table_begin(name), TABLE_END, f"\n{content}\n")
    return text


def _slopes(found: dict[str, Any]) -> str:
    base, rows = found["base"], found["base"]["rows"]
    cells = []
    for axis, own in found["axes"].items():
        by = 1 if axis == "rows" else rows
        each = [f"{one['seconds'] / (value if axis == 'rows' else rows) * 1e6:.3g}"
                for value, one in zip(own["values"], own["measured"], strict=True)]  # fmt: skip
        line = f"{_signed(own['start'] / by * 1e6)} + {power(max(own['slope'], 0.0) / by * 1e6)} · n"
        if axis == "rows":
            line = f"{power(own['slope'] * 1e6)} a row, whatever their number"
        cells.append([_NAMES[axis], ", ".join(f"{value:,}" for value in own["values"]), ", ".join(each), line])
    others = ", ".join(f"{base[axis]:,} {_NAMES[axis]}" for axis in found["axes"])
    words = (
        f"Microseconds of one core for a row, while all else stays at {others}; two spaces, of the inputs and of "
        f"{found['hidden_units']} features. Made with torch {found['environment']['torch']}."
    )
    return f"{words}\n\n{table(['n', 'tried', 'µs a row', 'line, µs a row'], cells, words=4)}"


def nodes(found: dict[str, Any] | None) -> str:
    """Rows on three nodes beside one process, and points in shards beside one index."""
    if found is None or not {"rows", "index"} <= set(found):  # each is measured on its own
        return "It has not been run yet."
    one, three, index = found["one_process"], found["three_nodes"], found["index"]
    rows = found["rows"]
    peaks = ", ".join(f"{peak:,.0f}" for peak in found["node_peak_mib"])
    cells = [
        ["rows a second", f"{rows / one['seconds']:,.0f}", f"{rows / three['seconds']:,.0f}"],
        ["processor seconds", f"{one['processor_seconds']:,.0f}", f"{three['processor_seconds']:,.0f}"],
        ["peak memory of each node, MiB", "", peaks],
        [f"neighbours of {index['queries']} among {index['points']:,} points, s", f"{index['one_index_seconds']:.2f}",
         f"{index['shards_seconds']:.2f}"],
    ]  # fmt: skip
    same = "the same bytes" if found["same_bytes"] else "other bytes"
    bits = "to the last bit" if index["same_bits"] else "not to the last bit"
    words = (
        f"{rows:,} rows of {found['columns']} columns from a Parquet file, on a machine of "
        f"{found['environment']['cores']} cores{_others(found['environment'])}; {same} are written, and "
        f"shards answer as one index, {bits}. Time over that of one process with the same cores: "
        f"{found['overhead_seconds']:.2f} ({MOST:g} allowed, {'✓' if found['overhead_seconds'] <= MOST else '✗'}); "
        f"processor time: {found['overhead_processor']:.2f}, the start of the workers included."
    )
    return f"{words}\n\n{table(['', 'one process', 'three nodes'], cells)}"


def _others(environment: dict[str, Any]) -> str:
    """That others used the machine, where the file says how many processes waited before the run began."""
    load = environment.get("load", 0.0)
    return f" that others used too (load average {load:.1f} at the start)" if load >= BUSY else ""


def _estimate(found: dict[str, Any]) -> str:
    """From the line over training points, whose start holds all else."""
    rows, line = found["base"]["rows"], found["axes"]["training_points"]
    kept = [one["file_bytes"] for one in line["measured"]]
    points = line["values"]
    bytes_each = (kept[-1] - kept[0]) / (points[-1] - points[0])
    start, slope = line["start"] / rows, line["slope"] / rows
    seconds = ROWS * (start + slope * POINTS)
    model = bytes_each * POINTS / 2**30
    workers = max(1, int(ROOM * GIB / model))
    core_hours, cores = seconds / 3600, MACHINES * CORES
    without = ROWS * (start + slope * 10**5) / cores / 60
    largest = max(points)
    told = [
        f"- This extrapolates: at most {largest:,} training points were measured, and {POINTS:,} are "
        f"{POINTS / largest:,.0f} times as many. Nothing says that the line stays one so far out."
    ]
    return "\n".join(
        [
            *(told if largest < POINTS else []),
            f"- A row costs {start * 1e6:.3g} µs + {power(slope * 1e6)} µs for every training point: "
            f"{start + slope * POINTS:.2g} s of a core.",
            f"- All of them: {core_hours:,.0f} core hours, {core_hours / 24 / 365:.2g} years of one core, "
            f"{core_hours / cores / 24:.2g} days on the {cores:,} cores of the {MACHINES} machines. With 10⁵ of the "
            f"training points {without:,.1f} minutes there.",
            f"- A training point takes {bytes_each:,.0f} bytes of the file, so a worker needs {model:,.0f} GiB and "
            f"a machine has room for {workers}: start Ray there with `OMP_NUM_THREADS={max(1, CORES // workers)} ray "
            f"start --num-cpus={workers} …`, so that {workers} workers use {CORES} cores.",
        ]
    )


def _signed(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")


if __name__ == "__main__":
    results, page = map(Path, sys.argv[1:])
    write_text(page, scale_page(page.read_text(encoding="utf-8"), results))
