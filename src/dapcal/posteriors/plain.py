"""A trained network is enough: its likelihood read off its outputs and targets, and a posterior around its last layer.

The prior scale σ0 is the best for held-out data. The network itself is the limit σ0 → 0: where the last layer's spread
only hurts near the data, hardly any is left there, and φ widens it away from them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from dapcal.data import Data, Labelled, check_inputs
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, MultiLabel
from dapcal.likelihoods.classes import FROM_ZERO, SOFT_LABELS, are_soft_labels
from dapcal.networks import checked_outputs, copied, last_linear, plain, run
from dapcal.posteriors import laplace
from dapcal.posteriors._training.checks import check_likelihood
from dapcal.posteriors.contradiction import warn_if_contradicted
from dapcal.posteriors.network import NetworkPosterior

TRIED = 1000  # held-out inputs that prior scales are tried on
FULL = 1000  # parameters of a last layer with a full covariance; more take seconds to minutes, so Kronecker factors
LARGEST = 200_000  # parameters of a network that is taken whole, where it has no linear last layer
_BATCH = 256
_SEVERAL = 30  # outputs that tell probabilities from logits
_SURE = 0.01  # no probability counts as surer than this
_TELLS = 0.98  # of the cross-entropy: what fits no better than this may do so by chance


def around_given(
    network: nn.Module, likelihood: Likelihood | None, train: Labelled, held_out: Labelled, chooses: Tensor, seed: int
) -> NetworkPosterior:
    """A posterior of a trained network, which stays as it is; its likelihood is found if it is not given.

    Args:
        network: in any mode.
        likelihood: p(y | outputs), or None.
        train: what it was trained on.
        held_out: in-distribution data that it was not trained on.
        chooses: rows of these that choose σ0.
        seed: of the draws.
    """
    if likelihood is not None:
        check_likelihood(likelihood)
    check_inputs(held_out.x, "held_out", like=train.x)
    network = copied(plain(network)).eval()
    found = likelihood_for(network, train) if likelihood is None else likelihood
    one = outputs_at(network, train.x[:1])
    first = held_out.subset(chooses.to(held_out.x.device))
    train, first = (check_targets(found, one, data) for data in (train, first))
    if likelihood is not None:
        refuse_squashed(network, likelihood, train)
    warn_if_contradicted(network, found, train, held_out)
    return around(network, found, train, first, seed)


def around(
    network: nn.Module, likelihood: Likelihood, train: Labelled, chooses: Labelled, seed: int = 0,
    batches: Data | None = None,
) -> NetworkPosterior:  # fmt: skip
    """A Laplace approximation of the last layer, with the σ0 that is best on held-out data.

    A network without a linear layer at its end is taken as a whole, if it is small.

    Args:
        network: trained, in evaluation mode.
        likelihood: p(y | outputs).
        train: what it was trained on.
        chooses: in-distribution data that it was not trained on.
        seed: of the draws.
        batches: the training data as they are to be read, if not from `train`.
    """
    data: Data = (train.x, train.y) if batches is None else batches
    held_out = chooses.x[:TRIED], chooses.y[:TRIED]
    try:
        last = network.get_submodule(last_linear(network, train.x[:1]))
        small = sum(parameter.numel() for parameter in last.parameters()) <= FULL
        structure = laplace.Full if small else laplace.Kronecker
        return laplace.last_layer(network, likelihood, data, structure=structure, held_out=held_out, seed=seed)
    except ValueError as error:
        size = sum(p.numel() for p in network.parameters() if p.requires_grad)
        if size == 0:
            raise ValueError(
                f"This network has no last layer to take ({error}), and no other weights to learn; calibrate it before "
                "it is quantised, or unfreeze some of its weights"
            ) from error
        if size > LARGEST:
            raise ValueError(
                f"This network has no last layer to take ({error}), and {size} parameters are too many to take all of "
                "them; fit a posterior (dapcal.posteriors), e.g. an ensemble, and calibrate that"
            ) from error
    return laplace.fit(network, likelihood, data, held_out=held_out, seed=seed)


def likelihood_for(network: nn.Module, train: Labelled) -> Likelihood:
    """What targets and outputs say of themselves; what they leave in doubt is asked for.

    Whole numbers are classes (`Categorical`, one output a class; `Bernoulli`, one logit) or, as zeros and ones for
    every output, labels (`MultiLabel`); fractions are targets of a `Gaussian` whose noise level is that of the training
    residuals.
    """
    outputs = outputs_at(network, train.x[:_BATCH])
    found = kind_of(outputs, train.y)
    refuse_squashed(network, found, train)
    return Gaussian(residual_noise([network], train, outputs.shape[1])) if isinstance(found, Gaussian) else found


def kind_of(outputs: Tensor, y: Tensor) -> Likelihood:
    """The likelihood for outputs (N, C) of some inputs and all targets, a Gaussian one without its noise level."""
    width = outputs.shape[1]
    if y.is_complex():
        raise ValueError(
            f"Expected numbers as targets, got {y.dtype}; give their real and imaginary parts as two targets"
        )
    if y.ndim > 2:
        raise ValueError(
            f"Expected `likelihood` for targets of shape {tuple(y.shape)}; for a class at every place give "
            f"PerPlace(Categorical(), places={tuple(y.shape[1:])}), for numbers flatten them, y.flatten(1)"
        )
    if y.is_floating_point():
        return _of_fractions(y, width)
    if y.ndim > 1 and y.shape[1] != 1:
        likelihood: Likelihood = _of_labels(y, width)
    else:
        likelihood = _of_classes(y, width)
    refuse_probabilities(outputs)
    return likelihood


def _of_fractions(y: Tensor, width: int) -> Gaussian:
    targets = y.shape[1] if y.ndim > 1 else 1
    if width != targets:
        raise ValueError(
            f"Expected `likelihood`: the network has {width} outputs and the targets are {targets} fractional "
            "number(s) an input. For noise that depends on the input give NoiseHead(); quantiles become a location and "
            "a noise by FromQuantiles(network, levels); classes are whole numbers (y.long())"
        )
    if bool((y == y.round()).all()) and len(y.unique()) == 2:
        meant, kind = ("labels", "MultiLabel()") if targets > 1 else ("classes", "Bernoulli()")
        if targets > 1 and bool((y.sum(1) == 1).all()):
            meant, kind = "one-hot classes", "Categorical() with y.argmax(1)"
        raise ValueError(
            f"Expected `likelihood`: the targets are two whole numbers stored as fractions, which may be {meant} or "
            f"numbers; give {kind} or Gaussian()"
        )
    if targets > 1 and are_soft_labels(y, targets):
        raise ValueError(
            f"Expected `likelihood`: the targets are {SOFT_LABELS.format(tuple(y.shape))}; if they are shares to be "
            "predicted as numbers, give Gaussian()"
        )
    return Gaussian()


def _of_labels(y: Tensor, width: int) -> MultiLabel:
    if y.shape[1] != width or int(y.min()) < 0 or int(y.max()) > 1:
        raise ValueError(
            f"Expected `likelihood` for {width} outputs and whole-number targets of shape {tuple(y.shape)} from "
            f"{int(y.min())} to {int(y.max())}; classes are (N,), labels zeros and ones for every output, counts "
            "Poisson(), other numbers y.float()"
        )
    if bool((y.long().sum(1) == 1).all()):
        raise ValueError(
            "Expected `likelihood`: every row of the targets has one 1, which may be one-hot classes or labels; give "
            "the classes as y.argmax(1), or MultiLabel()"
        )
    return MultiLabel()


def _of_classes(y: Tensor, width: int) -> Likelihood:
    classes = int(y.max()) + 1
    if width == 1:
        if classes > 2:
            raise ValueError(
                f"Expected `likelihood`: one output, and whole-number targets up to {classes - 1}, which may be counts "
                "or classes; for counts give Poisson() if the output is the log of a rate, for regression use y.float()"
            )
        return Bernoulli()
    if classes > width or int(y.min()) < 0 or len(y.unique()) != width:
        rather = ", without the rows to be ignored (x[y >= 0], y[y >= 0])" if int(y.min()) < 0 else ""
        rather = FROM_ZERO if int(y.min()) == 1 and classes == width + 1 else rather
        raise ValueError(
            f"Expected `likelihood`: {width} outputs, and {len(y.unique())} different targets from {int(y.min())} to "
            f"{int(y.max())}; if outputs are logits of classes, give Categorical(){rather}"
        )
    return Categorical()


def refuse_probabilities(outputs: Tensor) -> None:
    """Outputs that a softmax or sigmoid has made already cannot be calibrated as logits."""
    positive = bool((outputs >= 0).all())
    if outputs.shape[1] > 1 and positive and torch.allclose(outputs.sum(1), outputs.new_ones(()), atol=1e-5):
        raise ValueError(
            "The model returns numbers that sum to one, as a softmax does; return the logits before it, so that they "
            "can be calibrated"
        )


def refuse_sigmoids(outputs: Tensor, y: Tensor) -> None:
    """Likewise of one logit (N, 1) or of labels (N, L), with targets of zeros and ones.

    Logits of a network that has learnt little may lie between 0 and 1, too. Probabilities tell more of the targets than
    their share of ones does, and more than they would as logits.
    """
    if len(outputs) < _SEVERAL or not bool(((outputs >= 0) & (outputs <= 1)).all()):
        return
    y = y.reshape(outputs.shape).to(outputs)
    read = [binary_cross_entropy(p.clamp(_SURE, 1 - _SURE), y) for p in (outputs, y.mean(0).expand_as(y))]
    if read[0] < _TELLS * torch.minimum(read[1], binary_cross_entropy_with_logits(outputs, y)):
        raise ValueError(
            "The model returns numbers between 0 and 1 that fit the targets as probabilities and not as logits, as a "
            "sigmoid does; return the logits before it, or torch.logit(outputs, eps=1e-6), so that they can be "
            "calibrated"
        )


def refuse_squashed(network: nn.Module, likelihood: Likelihood, train: Labelled) -> None:
    """Refuse probabilities in place of logits, by outputs at training inputs from first to last, of checked targets."""
    if not isinstance(likelihood, Categorical | Bernoulli | MultiLabel):
        return
    rows = torch.linspace(0, len(train.x) - 1, min(len(train.x), _BATCH)).round().long()
    some = train.subset(rows.to(train.x.device))
    outputs = outputs_at(network, some.x).double()
    refuse_probabilities(outputs)
    if not isinstance(likelihood, Categorical):
        refuse_sigmoids(outputs, some.y)


def outputs_at(network: nn.Module, x: Tensor) -> Tensor:
    """Outputs (N, C) of a network, which is in evaluation mode."""
    with torch.no_grad():
        return checked_outputs(run(network, x), len(x))


def residual_noise(networks: Sequence[nn.Module], train: Labelled, targets: int) -> float:
    """Root mean square of the training residuals, over all networks."""
    y = Gaussian().check(train.x.new_zeros(len(train.x), targets), train.y)
    deviation = float(y.double().std(0).mean())
    if not deviation > 0:
        raise ValueError("Expected targets that differ in `train`, but all are the same; there is nothing to predict")
    total = 0.0
    for network in networks:
        for x, own in zip(train.x.split(_BATCH), y.split(_BATCH), strict=True):
            outputs = outputs_at(network, x)
            total += float((outputs - own.to(outputs)).double().square().sum())
    return max((total / (len(networks) * y.numel())) ** 0.5, 1e-4 * deviation)  # a network may interpolate


def check_targets(likelihood: Likelihood, one: Tensor, data: Labelled) -> Labelled:
    """Targets as the likelihood wants them, given outputs `one` (1, C) of one input."""
    return Labelled(data.x, likelihood.check(one.expand(len(data.x), -1), data.y.to(one.device)))
