"""Last-layer Kronecker Laplace of a 3-layer CNN on 50,000 inputs: fit and probit predictions, ours and laplace-torch's.

Each runs in processes of its own, in turns; reported are medians, and their ratio. `make test-peers` installs
laplace-torch. Run: .venv-peers/bin/python benchmarks/laplace_last_layer.py
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

INPUTS, BATCH, RUNS = 50_000, 512, 3


def main() -> None:
    found = {"dapcal": [], "laplace-torch": []}
    for _ in range(RUNS):
        for name, results in found.items():
            results.append(measured(name))
            print(name, results[-1], flush=True)
    for what in ("fit s", "predict s", "total s", "peak MiB"):
        ours, theirs = (statistics.median(r[what] for r in found[name]) for name in found)
        print(f"{what}: ours {ours:.2f}, laplace-torch {theirs:.2f}, ratio {ours / theirs:.2f}")
    difference = max(abs(a - b) for a, b in zip(*(found[n][0]["probabilities"] for n in found), strict=True))
    print(f"largest difference of the first 100 probabilities of class 0: {difference:.4f}")


def measured(name: str, inputs: int = INPUTS) -> dict[str, Any]:
    """One run in a process of its own: seconds, peak and the first probabilities."""
    command = [sys.executable, __file__, name, str(inputs)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def run(name: str, inputs: int) -> None:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(4), nn.Flatten(), nn.Linear(32 * 9, 10),
    ).eval()  # fmt: skip
    x, y = torch.randn(inputs, 1, 28, 28), torch.arange(inputs) % 10
    if name == "dapcal":
        import dapcal
        from dapcal.ensembles import seen

        before, started = peak(), time.perf_counter()
        posterior = dapcal.posteriors.laplace.last_layer(
            model, dapcal.likelihoods.Categorical(), (x, y), structure=dapcal.posteriors.laplace.Kronecker,
            batch_size=BATCH,
        )  # fmt: skip
        fitted = time.perf_counter()
        likelihood = posterior.likelihood
        probabilities = torch.cat([likelihood.mean(seen(posterior, batch)) for batch in x.split(BATCH)])
    else:
        from laplace import Laplace

        before, started = peak(), time.perf_counter()
        la = Laplace(model, "classification", subset_of_weights="last_layer", hessian_structure="kron")
        la.fit(DataLoader(TensorDataset(x, y), batch_size=BATCH))
        fitted = time.perf_counter()
        probabilities = torch.cat([la(batch, link_approx="probit").detach() for batch in x.split(BATCH)])
    ended = time.perf_counter()
    print(
        json.dumps(
            {
                "fit s": round(fitted - started, 4),
                "predict s": round(ended - fitted, 4),
                "total s": round(ended - started, 4),
                "peak MiB": round(peak() - before, 1),
                "probabilities": [round(p, 5) for p in probabilities[:100, 0].tolist()],
            }
        )
    )


def peak() -> float:
    """Largest resident set of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 1 else main()
