"""ODIN: max softmax at a high temperature, of inputs moved towards their predicted class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dapcal.data import Data, check_inputs, gather
from dapcal.detectors.activations import BATCH, batchwise, frozen, logits_of
from dapcal.detectors.logits import doubt, margin
from dapcal.distances.outliers import noise
from dapcal.networks import backward_in_evaluation
from dapcal.ranks import auroc

TEMPERATURES = (1.0, 10.0, 100.0, 300.0, 500.0, 1000.0)
EPSILONS = tuple(round(0.001 + 0.017 * step, 3) for step in range(30))  # 0.001 to 0.494


def fit(
    network: nn.Module,
    held_out: Data,
    outliers: Tensor | None = None,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    epsilons: Sequence[float] = EPSILONS,
    most: int = 1000,
    seed: int = 0,
    batch_size: int = BATCH,
) -> Odin:
    """The temperature and step that best tell held-out inputs from outliers, by AUROC.

    1 − max softmax(f(x̃)/T) with x̃ = x − ε sign(−∂/∂x log max softmax(f(x)/T)).
    Among equals the smaller false positive rate counts, then the smaller step, then the lower temperature.
    Liang, Li, Srikant (2018), arXiv:1706.02690, who choose on outliers of the test's kind; here they are synthetic
    unless given.

    Args:
        network: a trained classifier that gradients can pass.
        held_out: inputs that it was not trained on (labels are not used).
        outliers: inputs (M, ...) that count as far out; by default uniform noise in the range of the held-out inputs
            (images: of all values together, else of each column).
        temperatures: T to try.
        epsilons: ε to try, in units of the inputs.
        most: largest number of held-out inputs, and of outliers, that the choice is made on.
        seed: of which inputs those are, and of the noise.
        batch_size: inputs per forward pass.
    """
    x = gather(held_out, "held_out").x
    if not x.is_floating_point():
        raise ValueError(f"Expected floating-point inputs, which ODIN can move, got {x.dtype}; use another detector")
    if not temperatures or min(temperatures) <= 0 or not epsilons or min(epsilons) < 0:
        raise ValueError(
            f"Expected `temperatures` > 0 and `epsilons` >= 0, at least one of each, got {list(temperatures)} and "
            f"{list(epsilons)}"
        )
    generator = torch.Generator().manual_seed(seed)
    inside = _some(x, most, generator)
    outside = (
        _noise(x, len(inside), generator)
        if outliers is None
        else _some(check_inputs(outliers, "outliers", x), most, generator)
    )
    copy = frozen(network)
    pairs = [(t, e) for e in sorted(epsilons) for t in sorted(temperatures)]
    near, far = (_grid(copy, some, pairs, batch_size) for some in (inside, outside))
    areas = [auroc(f, n) for f, n in zip(far, near, strict=True)]
    rates = [false_positive_rate(f, n) for f, n in zip(far, near, strict=True)]
    best = min(range(len(pairs)), key=lambda i: (-areas[i], rates[i], i))
    return Odin(copy, *pairs[best], areas[best], rates[best], batch_size)


@dataclass(frozen=True, eq=False)
class Odin:
    """1 − max softmax(f(x̃)/T).

    Attributes:
        network: a frozen copy.
        temperature: T.
        epsilon: ε.
        auroc: of held-out inputs against outliers, at the chosen T and ε.
        false_positive_rate: outliers taken for inliers where 95 % of the held-out inputs are.
        batch_size: inputs per forward pass.
    """

    network: nn.Module
    temperature: float
    epsilon: float
    auroc: float
    false_positive_rate: float
    batch_size: int = BATCH

    def __call__(self, x: Tensor) -> Tensor:
        """Scores (N,)."""

        def score(batch: Tensor) -> Tensor:
            moved = batch + self.epsilon * towards_prediction(self.network, batch, self.temperature)
            return doubt(logits_of(self.network, moved).double() / self.temperature)

        return batchwise(score, x, self.batch_size)


def towards_prediction(network: nn.Module, x: Tensor, temperature: float) -> Tensor:
    """sign ∂/∂x log max softmax(f(x)/T), shaped as x.

    The log-odds of the predicted class rise where its log-probability does, and their gradient does not vanish when
    the softmax saturates.
    """
    with torch.inference_mode(False), torch.enable_grad(), backward_in_evaluation(network):
        leaf = x.detach().clone().requires_grad_()
        odds = margin(logits_of(network, leaf).double() / temperature)
        (gradient,) = torch.autograd.grad(odds.sum(), leaf)
    return gradient.sign()


def false_positive_rate(outside: Tensor, inside: Tensor, level: float = 0.95) -> float:
    """Share of outliers that are accepted at the lowest threshold that accepts `level` of the inliers.

    >>> false_positive_rate(torch.tensor([1.0, 5.0]), torch.tensor([0.0, 1.0, 2.0]))
    0.5
    """
    threshold = inside.kthvalue(math.ceil(level * len(inside))).values
    return float((outside <= threshold).double().mean())


def _grid(network: nn.Module, x: Tensor, pairs: list[tuple[float, float]], batch_size: int) -> Tensor:
    """Scores (pairs, N) of every temperature and step; the direction depends on the temperature alone."""

    def scores(batch: Tensor) -> Tensor:
        ways = {t: towards_prediction(network, batch, t) for t in {t for t, _ in pairs}}
        return torch.stack([doubt(logits_of(network, batch + e * ways[t]).double() / t) for t, e in pairs])

    with torch.no_grad():
        return torch.cat([scores(batch) for batch in x.split(batch_size)], 1)


def _some(x: Tensor, most: int, generator: torch.Generator) -> Tensor:
    return x[torch.randperm(len(x), generator=generator)[:most].to(x.device)]


def _noise(x: Tensor, number: int, generator: torch.Generator) -> Tensor:
    low, high = (x.amin(), x.amax()) if x.ndim > 2 else (x.amin(0), x.amax(0))
    return noise((number, *x.shape[1:]), low, high, generator)
