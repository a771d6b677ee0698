"""Whether data contradict the network that is said to predict them: labels shifted, inputs unscaled, another unit.

A network may be weak, badly calibrated or trained with weights of the classes: it is not contradicted where what it
says goes with the targets at all.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

from dapcal.data import Labelled
from dapcal.likelihoods import Likelihood
from dapcal.posteriors._training.trivial import FEWEST, expected, some_rows
from dapcal.records import DapcalWarning

_ALMOST = 0.9  # times the deviation of the targets: an error that is worth nothing, if a line makes it half as large


def warn_if_contradicted(network: nn.Module, likelihood: Likelihood, train: Labelled, held_out: Labelled) -> None:
    """A warning that names the data at which the network is no better than an answer without inputs."""
    found = [
        (name, contradiction(network, likelihood, data)) for name, data in (("train", train), ("held_out", held_out))
    ]
    told = " and ".join(f"`{name}` ({told})" for name, told in found if told)
    if told:
        warnings.warn(
            f"The network is no better than an answer without inputs on {told}: are its inputs and targets scaled and "
            "numbered as in training, and is it trained? Bring them into the form that it was trained with",
            DapcalWarning,
            stacklevel=4,
        )


def contradiction(network: nn.Module, likelihood: Likelihood, data: Labelled) -> str:
    """Both numbers in words; nothing where the network says something of the targets, or rows are few."""
    if len(data.x) < FEWEST:
        return ""
    mean, y = expected(network, likelihood, some_rows(data))
    decisions = likelihood.decisions(mean, y)
    if decisions is not None:
        return _of_classes(decisions.probs, decisions.y)
    return _of_numbers(mean, y.double()) if mean.shape == y.shape else ""


def _of_classes(probs: Tensor, y: Tensor) -> str:
    """Log probabilities that are no higher for the class that was the case, or right answers that are too rare.

    The first is the slope at zero of the log-likelihood over the inverse temperature, with shares of the classes as
    they are: where it is not positive, no temperature and no weights of classes gain anything. Neighbouring classes
    may be alike, so that it is positive for shifted labels; then hardly any answer is right.
    """
    if len(y) < FEWEST:
        return ""
    log_p = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
    shares = y.bincount(minlength=probs.shape[1]).to(probs) / len(y)
    if float(shares.max()) == 1:
        return ""
    slope = float((log_p.gather(1, y[:, None])[:, 0] - log_p @ shares).mean())
    says = probs.argmax(1)
    right = float((says == y).double().mean())
    chance = float((says.bincount(minlength=probs.shape[1]).to(probs) / len(y)) @ shares)
    error = math.sqrt(chance * (1 - chance) / len(y))
    if (slope <= 1e-6 and right <= chance + 2 * error) or right < chance - 3 * error:
        return f"accuracy {right:.3g}, the commonest class alone {float(shares.max()):.3g}"
    return ""


def _of_numbers(mean: Tensor, y: Tensor) -> str:
    """Errors clearly larger than those of the targets' mean, or no smaller where a line would make them so."""
    variance = y.var(0, correction=0)
    if not bool((variance > 0).all()):
        return ""
    own = ((mean - y) ** 2 / variance).mean(1)  # (N,)
    more = own - ((y - y.mean(0)) ** 2 / variance).mean(1)
    worse = not bool(mean.isfinite().all()) or float(more.mean()) > 2 * float(more.std()) / math.sqrt(len(y))
    centred = mean - mean.mean(0)
    along = (centred * (y - y.mean(0))).mean(0) ** 2 / (centred.square().mean(0) * variance).clamp_min(1e-300)
    by_line, own_mean = float((1 - along).mean()), float(own.mean())
    if worse or (own_mean >= _ALMOST**2 and by_line < own_mean / 4):
        error = float((mean - y).square().mean(0).sqrt().mean())
        return f"root mean square error {error:.3g}, deviation of the targets {float(variance.sqrt().mean()):.3g}"
    return ""
