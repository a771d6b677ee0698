"""One input to an ensemble of 5 MLPs 20-64-64-3 with 8,000 training points: calibrated, as module, by ONNX Runtime.

Reported are the shortest of many single-row latencies, in turns, with one thread each, and their ratio to the first.
Needs dapcal[onnx]. Run: python benchmarks/deployed.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import onnxruntime
import torch
from torch import nn

import dapcal
from dapcal import deploy

TRAIN, HELD_OUT, ROUNDS = 8_000, 2_000, 300


def main() -> None:
    torch.set_num_threads(1)
    calibrated = fitted()
    deployed = deploy.module(calibrated)
    exported = deploy.export(calibrated).module()
    session = session_of(calibrated)
    rows = torch.randn(ROUNDS, 1, 20)
    ways = {
        "calibrated(x), mean to p-value": lambda x: read(calibrated(x)),
        "module": deployed,
        "torch.export": exported,
        "ONNX Runtime": lambda x: session.run(None, {"x": x.numpy()}),
    }
    times: dict[str, float] = dict.fromkeys(ways, float("inf"))
    with torch.no_grad():
        for row in rows:  # in turns, so that other load on the machine meets all of them
            for name, way in ways.items():
                started = time.perf_counter()
                way(row)
                times[name] = min(times[name], time.perf_counter() - started)
    first = next(iter(times.values()))
    for name, seconds in times.items():
        print(f"{name}: {1e3 * seconds:.2f} ms, {seconds / first:.2f} times the first")


def fitted() -> dapcal.calibrate.Calibrated:
    torch.manual_seed(0)
    x = torch.randn(TRAIN + HELD_OUT, 20)
    y = (x[:, 0] > 0.5).long() + (x[:, 1] + 0.5 * torch.randn(len(x)) > 0.5).long()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    train, held_out = (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])
    posterior = dapcal.posteriors.ensemble.fit(make, dapcal.likelihoods.Categorical(), train, members=5, epochs=3)
    return dapcal.calibrate(posterior, train=train, held_out=held_out)


def session_of(calibrated: dapcal.calibrate.Calibrated) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        deploy.to_onnx(calibrated, path)
        print(f"ONNX file: {path.stat().st_size / 2**20:.1f} MiB")
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def read(prediction: dapcal.predictive.Prediction) -> list[torch.Tensor]:
    """The fields that the others return; a prediction computes them when they are asked for."""
    return [getattr(prediction, name) for name in deploy.Predicted._fields]


if __name__ == "__main__":
    main()
