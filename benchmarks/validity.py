"""Are the p-values valid? P(p <= α) over fresh splits, for every piece of evidence and for the score.

Every split draws new rows: training rows, a half that chooses, a half that judges, and new rows to ask about. Errors
are Monte Carlo standard errors over splits. Three ways:

- "calibrate": one ensemble, trained once by the library; each split has new held-out rows and runs `dapcal.calibrate`.
- "batched": networks of all splits trained side by side in plain torch, stopped where the NLL of the half that chooses
  is lowest, and once more on all rows for as long ("refit"), as `dapcal.recipes` does; pieces, scales,
  weights and p-values are the library's. Asked about with the members before the refit ("off") and after it ("on").
- "recipe": `dapcal.recipes.fit` itself with refit and without gap cross-validation, columns checked one by one as in
  tables, with the fewest judging rows alone, as it trains one by one. It asks the members from before the refit.

Run: python benchmarks/validity.py [folder] [way ...]
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dapcal
from dapcal import recipes
from dapcal.calibration.ood_score import fit_evidence, pieces_of
from dapcal.calibration.weighing import PROBES, standardised, weights_of
from dapcal.distances import Space
from dapcal.distances.column_checks import Columns
from dapcal.distances.column_statistics import Part
from dapcal.distances.outliers import near
from dapcal.distances.projectors import Identity
from dapcal.ensembles import base_ensemble
from dapcal.experiments.records import environment
from dapcal.files import write_text
from dapcal.likelihoods import Categorical, Gaussian, Likelihood
from dapcal.posteriors import ensemble
from dapcal.types import DapcalWarning

LEVELS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
JUDGING = (20, 100, 500)
SPLITS, ASKED, WIDTH, MEMBERS = 500, 500, 16, 3
TASKS: dict[str, Likelihood] = {"classification": Categorical(), "regression": Gaussian(0.5)}
COLUMNS = 4


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("folder", nargs="?", type=Path, default=Path("build"))
    asked.add_argument("ways", nargs="*", metavar="way", help=", ".join(WAYS))
    options = asked.parse_args()
    folder: Path = options.folder
    warnings.simplefilter("ignore", DapcalWarning)
    torch.set_num_threads(1)
    for way in options.ways or WAYS:
        started = time.perf_counter()
        found = {name: summary(shares) for name, shares in WAYS[way]()}
        results = {
            "experiment": f"validity-{way}",
            "splits": SPLITS,
            "levels": LEVELS,
            "environment": environment(),
            "seconds": round(time.perf_counter() - started, 1),
            "shares": found,
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"validity-{way}.json", json.dumps(results, indent=1) + "\n")
        show(way, found)


Shares = dict[str, list[list[float]]]
"""By piece: for every split the share of asked rows with p-values up to each level."""


def draw(rows: int, task: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two classes that overlap, or a noisy function, of four columns."""
    x = torch.randn(rows, COLUMNS, generator=generator)
    f = x[:, 0] * x[:, 1] + torch.sin(2 * x[:, 2])
    if task == "classification":
        return x, (torch.rand(rows, generator=generator) < torch.sigmoid(3 * f)).long()
    return x, (f + 0.3 * torch.randn(rows, generator=generator))[:, None]


def with_calibrate() -> Iterator[tuple[str, Shares]]:
    for task, likelihood in TASKS.items():
        generator = torch.Generator().manual_seed(0)
        train = draw(400, task, generator)
        options = {"epochs": 30, "batch_size": 64, "learning_rate": 1e-2}
        posterior = ensemble.fit(lambda: _network(task), likelihood, train, members=MEMBERS, seed=0, **options)  # noqa: B023
        for judging in JUDGING:
            shares: Shares = {}
            for split in range(SPLITS):
                held_out = draw(2 * judging, task, generator)
                calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out, candidates=3, seed=split)
                _count(shares, calibrated(draw(ASKED, task, generator)[0]))
            yield f"{task}, {judging} judge, refit off", shares


def with_recipe() -> Iterator[tuple[str, Shares]]:
    columns = Columns(tuple(Part(number=place, center=0.0, scale=1.0) for place in range(COLUMNS)))
    spaces = (Space(Identity(), columns, radius=None, name="columns"),)
    judging = JUDGING[0]
    for task, likelihood in TASKS.items():
        shares: Shares = {}
        for split in range(SPLITS):
            generator = torch.Generator().manual_seed(split)
            x, y = draw(10 * judging, task, generator)
            recipe = recipes.Recipe(
                hidden=(WIDTH,), members=2, epochs=12, batch_size=80, learning_rate=2e-2, fast=True, seed=split
            )
            fitted = recipes.fit(x, y, likelihood, _outputs(task), recipe, evidence=spaces)
            _count(shares, fitted.calibrated(draw(ASKED, task, generator)[0]))
        yield f"{task}, {judging} judge, refit on", shares


def with_batched() -> Iterator[tuple[str, Shares]]:
    for task, likelihood in TASKS.items():
        for judging in JUDGING:
            generator = torch.Generator().manual_seed(judging)
            train = {20: 160, 100: 800, 500: 1500}[judging]
            rows = train + 2 * judging
            data = [draw(rows + ASKED, task, generator) for _ in range(SPLITS)]
            x, y = (torch.stack(part) for part in zip(*data, strict=True))  # (splits, rows, ...)
            old, new = _trained(x[:, :rows], y[:, :rows], train, judging, task, generator)
            shares: dict[str, Shares] = {"off": {}, "on": {}}
            for split in range(SPLITS):
                first, second = old.of(split), new.of(split)
                held_out, asked = x[split, train:rows], x[split, rows:]
                scaling, conformal = (
                    _pieces(likelihood, first, first, x[split, :train], half) for half in held_out.split(judging)
                )
                outliers = near(x[split, :train], held_out[:judging][:PROBES])
                outside = [_pieces(likelihood, first, first, x[split, :train], far) for far in outliers.values()]
                evidence = fit_evidence((), scaling, conformal, weights_of(*standardised(scaling, outside)))
                for refit, members, base in (("off", first, x[split, :train]), ("on", second, x[split, :rows])):
                    pieces = _pieces(likelihood, members, first, base, asked)
                    values = evidence.standardised(pieces)
                    named = dict(zip(("doubt", "features", "inputs", "normalised features"), values, strict=True))
                    assert evidence.held_out_pieces is not None
                    for ordered, (name, value) in zip(evidence.held_out_pieces, named.items(), strict=True):
                        below = torch.searchsorted(ordered, value.contiguous())
                        _add(shares[refit], name, (1 + judging - below).double() / (judging + 1))
                    _add(shares[refit], "score", evidence.p_value(evidence.score(pieces)))
            for refit, found in shares.items():
                yield f"{task}, {judging} judge, refit {refit}", found


WAYS = {"calibrate": with_calibrate, "batched": with_batched, "recipe": with_recipe}


class Networks(NamedTuple):
    """One hidden layer each, of every member of every split; of one split with `of`."""

    a: Tensor  # (splits · members, P, width)
    b: Tensor  # (splits · members, 1, width)
    c: Tensor  # (splits · members, width, C)
    d: Tensor  # (splits · members, 1, C)

    def of(self, split: int) -> Networks:
        """Members of one split."""
        return Networks(*(t[split * MEMBERS : (split + 1) * MEMBERS] for t in self))

    def hidden(self, x: Tensor) -> Tensor:
        """Of inputs (nets, N, P)."""
        return (x @ self.a + self.b).relu()

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs at inputs (nets, N, P)."""
        return self.hidden(x) @ self.c + self.d


def _trained(
    x: Tensor, y: Tensor, train: int, judging: int, task: str, generator: torch.Generator
) -> tuple[Networks, Networks]:
    """Members before and after the refit, all splits side by side."""
    xs, ys = (t.repeat_interleave(MEMBERS, 0) for t in (x, y))
    chooses = slice(train, train + judging)
    nets, best, epochs = len(xs), torch.full((len(xs),), math.inf), torch.ones(len(xs))
    old = new = None
    for step, part in _descent(xs[:, :train], ys[:, :train], task, generator):
        nll = _nll(part(xs[:, chooses]), ys[:, chooses], task)
        better = nll < best
        best, epochs = best.where(~better, nll), epochs.where(~better, torch.tensor(float(step)))
        old = part if old is None else Networks(*map(_where(better), part, old))
    until = epochs.reshape(-1, MEMBERS).median(1).values.repeat_interleave(MEMBERS)  # as `recipes.refit` takes it
    for step, part in _descent(xs, ys, task, generator):
        done = until == step
        new = part if new is None else Networks(*map(_where(done), part, new))
    assert old is not None
    assert new is not None
    assert len(until) == nets
    return old, new


def _where(mask: Tensor) -> Any:
    return lambda one, other: one.where(mask[:, None, None], other)


def _descent(
    x: Tensor, y: Tensor, task: str, generator: torch.Generator, epochs: int = 20, batch: int = 40
) -> Iterator[tuple[int, Networks]]:
    """Networks after each epoch of Adam with a learning rate that falls as a cosine."""
    nets, rows, inputs = x.shape
    shapes = ((inputs, WIDTH), (1, WIDTH), (WIDTH, _outputs(task)), (1, _outputs(task)))
    scales = (inputs**-0.5, 0.1, WIDTH**-0.5, 0.1)
    part = Networks(
        *(s * torch.randn(nets, *shape, generator=generator) for s, shape in zip(scales, shapes, strict=True))
    )
    parameters = [t.requires_grad_() for t in part]
    per_epoch = min(max(rows // batch, 1), 10)
    optimizer = torch.optim.Adam(parameters, lr=2e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch)
    for epoch in range(1, epochs + 1):
        for _ in range(per_epoch):
            taken = torch.randint(rows, (min(batch, rows),), generator=generator)
            loss = _nll(part(x[:, taken]), y[:, taken], task).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        yield epoch, Networks(*(t.detach().clone() for t in part))


def _nll(outputs: Tensor, y: Tensor, task: str) -> Tensor:
    """Per network, up to a constant, (nets,)."""
    if task == "classification":
        return nn.functional.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none").view_as(y).mean(1)
    return ((outputs - y) ** 2).mean((1, 2)) / (2 * 0.5**2)


def _pieces(likelihood: Likelihood, members: Networks, center: Networks, train: Tensor, x: Tensor) -> Tensor:
    """Doubt of the members; distances to training rows in features of the first of `center`, and between inputs."""
    hidden = [center.hidden(each[None].expand(MEMBERS, -1, -1))[0] for each in (x, train)]
    unit = [nn.functional.normalize(h, dim=1) for h in hidden]
    near = [torch.cdist(a, b).amin(1) for a, b in (hidden, (x, train), unit)]
    outputs = members(x[None].expand(MEMBERS, -1, -1))
    return pieces_of(likelihood, base_ensemble(likelihood, outputs), torch.stack(near[:2]), near[2][None])


def _network(task: str) -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, _outputs(task)))


def _outputs(task: str) -> int:
    return 2 if task == "classification" else 1


def _count(shares: Shares, prediction: dapcal.Prediction) -> None:
    for name, piece in prediction.evidence.items():
        _add(shares, name, piece.p_value)
    _add(shares, "score", prediction.ood_p_value)


def _add(shares: Shares, name: str, p: Tensor) -> None:
    shares.setdefault(name, []).append([float((p <= level + 1e-9).double().mean()) for level in LEVELS])


def summary(shares: Shares) -> dict[str, dict[str, list[float]]]:
    """Mean over splits and its standard error, level by level."""
    told = {}
    for name, found in shares.items():
        values = torch.tensor(found, dtype=torch.float64)
        told[name] = {"share": values.mean(0).tolist(), "error": (values.std(0) / len(values) ** 0.5).tolist()}
    return told


def show(way: str, found: dict[str, dict[str, dict[str, list[float]]]]) -> None:
    for case, pieces in found.items():
        for name, told in pieces.items():
            cells = zip(LEVELS, told["share"], told["error"], strict=True)
            marks = "  ".join(
                f"{share:.3f} ± {error:.3f}{'' if share <= level + 2 * error else ' !'}"
                for level, share, error in cells
            )
            print(f"{way}: {case}: {name:20} {marks}", flush=True)


if __name__ == "__main__":
    main()
