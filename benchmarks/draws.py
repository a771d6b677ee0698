"""50 draws of a 784-30-30-10 network on 10,000 inputs: ours beside a loop, `vmap` and one flat matrix product.

The others run with their best batch size. Run: python benchmarks/draws.py
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.func import functional_call, vmap

from dapcal.networks import evaluate

DRAWS, INPUTS, SIZES = 50, 10_000, (512, 2048, 10_000)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 10)).eval()
    draws = {n: p.detach() + 0.05 * torch.randn(DRAWS, *p.shape) for n, p in model.named_parameters()}
    x = torch.randn(INPUTS, 784)

    def forward(parameters, batch):
        return functional_call(model, parameters, (batch,))

    def loop(batch):
        return torch.stack([forward({n: d[s] for n, d in draws.items()}, batch) for s in range(DRAWS)])

    def vectorised(batch):
        return vmap(forward, (0, None))(draws, batch)

    def flat(batch):
        w1, b1, w2, b2, w3, b3 = draws.values()
        first = batch @ w1.flatten(0, 1).T + b1.flatten()
        h = torch.tanh(first).unflatten(1, (DRAWS, 30)).transpose(0, 1)
        h = torch.tanh(torch.baddbmm(b2[:, None], h, w2.mT))
        return torch.baddbmm(b3[:, None], h, w3.mT)

    ways = {"ours": lambda: evaluate(model, draws, {}, x)}
    for function in (loop, vectorised, flat):
        for size in SIZES:
            ways[f"{function.__name__}, batches of {size}"] = lambda f=function, n=size: torch.cat(
                [f(b) for b in x.split(n)], 1
            )
    times: dict[str, float] = dict.fromkeys(ways, float("inf"))
    with torch.no_grad():
        reference = ways["ours"]()
        for _ in range(7):  # in turns, so that other load on the machine meets all of them
            for name, way in ways.items():
                started = time.perf_counter()
                outputs = way()
                times[name] = min(times[name], time.perf_counter() - started)
                torch.testing.assert_close(outputs, reference, rtol=1e-3, atol=1e-3)
    for name, seconds in times.items():
        print(f"{name}: {seconds:.3f} s")
    best = min((seconds, name) for name, seconds in times.items() if name != "ours")
    print(f"ours / fastest ({best[1]}): {times['ours'] / best[0]:.2f}")


if __name__ == "__main__":
    main()
