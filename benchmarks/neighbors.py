"""Nearest neighbours of 2,000 queries among 60,000 points of 84 numbers (LeNet-5's features) and of 784 (pixels).

Run: python benchmarks/neighbors.py
"""

from __future__ import annotations

import resource
import time

import torch

from dapcal.distances.neighbors import TorchIndex


def main() -> None:
    for dimension in (84, 784):
        points, queries = torch.randn(60_000, dimension), torch.randn(2_000, dimension)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        ours = TorchIndex(points).query(queries, 1)[0][:, 0]
        took = time.perf_counter() - start
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        start = time.perf_counter()
        plain = torch.cat([torch.cdist(block, points).min(1).values for block in queries.split(256)])
        other = time.perf_counter() - start
        error = float((ours - plain).abs().max())
        print(
            f"{dimension}: {took / other:.2f} times chunked cdist, {memory:.0f} MiB more, cdist is off by {error:.1e}"
        )


if __name__ == "__main__":
    main()
