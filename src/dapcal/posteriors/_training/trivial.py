"""How wrong a network is beside the answer that no input goes into: the mean of the targets, or the classes' shares."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dapcal.data import Labelled, pairs_of
from dapcal.likelihoods import Likelihood
from dapcal.networks import checked_outputs, run

ROWS = 1000  # that are looked at
NUMBERS = 4_000_000  # outputs that are looked at, where an input has very many; never under FEWEST inputs
FEWEST = 30
_BATCH = 256
_TEMPERATURES = torch.logspace(-2, 3, 51, dtype=torch.float64)


def beside_trivial(network: nn.Module, likelihood: Likelihood, data: Labelled) -> float | None:
    """Error of a network in evaluation mode, over that of the trivial answer; None where targets do not vary.

    Root mean square errors for numbers. For classes log-likelihoods, at the temperature that is best. So neither the
    noise level nor how sure the network is has a say.
    """
    mean, y = expected(network, likelihood, data)
    decisions = likelihood.decisions(mean, y)
    if decisions is None:
        return _of_numbers(mean, y.double())
    log_p = decisions.probs.clamp_min(torch.finfo(torch.float64).tiny).log()
    counts = decisions.y.bincount(minlength=log_p.shape[1]).double()
    trivial = torch.special.entr(counts / counts.sum()).sum()
    own = min(float(nn.functional.cross_entropy(log_p / t, decisions.y)) for t in _TEMPERATURES)
    return own / float(trivial) if trivial > 0 else None


def some_rows(data: Labelled | DataLoader) -> Labelled:
    """Rows from all over the data, or the first ones of one length of a loader, whose generator is left as it was."""
    if isinstance(data, Labelled):
        return _spread(data, ROWS)
    state = None if data.generator is None else data.generator.get_state()
    inputs: list[Tensor] = []
    targets: list[Tensor] = []
    with torch.random.fork_rng(devices=[]):
        for x, y in pairs_of(data, "train"):
            if not inputs or (x.shape[1:] == inputs[0].shape[1:] and y.shape[1:] == targets[0].shape[1:]):
                inputs.append(x)  # lengths may differ between batches
                targets.append(y)
            if sum(map(len, inputs)) >= ROWS:
                break
    if data.generator is not None and state is not None:
        data.generator.set_state(state)
    return Labelled(torch.cat(inputs)[:ROWS], torch.cat(targets)[:ROWS])


def expected(network: nn.Module, likelihood: Likelihood, data: Labelled) -> tuple[Tensor, Tensor]:
    """Expected targets, and targets as the likelihood wants them."""
    with torch.no_grad():
        width = checked_outputs(run(network, data.x[:1]), 1).shape[1]
        data = _spread(data, max(NUMBERS // width, FEWEST))
        outputs = torch.cat([checked_outputs(run(network, x), len(x)) for x in data.x.split(_BATCH)])
        y = likelihood.check(outputs, data.y.to(outputs.device))
        return likelihood.conditional(outputs[None]).mean[0], y


def _spread(data: Labelled, rows: int) -> Labelled:
    if rows >= len(data.x):
        return data
    return data.subset(torch.linspace(0, len(data.x) - 1, rows, dtype=torch.float64).long().to(data.x.device))


def _of_numbers(mean: Tensor, y: Tensor) -> float | None:
    variance = y.var(0, correction=0)
    if mean.shape != y.shape or not bool((variance > 0).all()):
        return None
    return float((((mean - y) ** 2).mean(0) / variance).mean().sqrt())
