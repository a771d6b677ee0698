"""From networks that you have trained yourself to a calibrated model, without further code.

networks ──► posterior (`network_posteriors.py`) ──► `dapcal.calibrate` ──► NetworkModel
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dapcal.calibrate import Calibrated, calibrate
from dapcal.data import Labelled, check_inputs, gather, split
from dapcal.likelihoods import Likelihood
from dapcal.models import network as kept
from dapcal.models.network import NetworkModel, on_device
from dapcal.models.network_posteriors import (
    guessed_task,
    likelihood_of,
    outputs_at,
    posterior_of,
    refuse_doubtful,
)
from dapcal.models.tokens import check_tokens
from dapcal.progress import Stages

_BATCH = 256


def fit(
    networks: Sequence[nn.Module],
    train: Labelled,
    held_out: Labelled,
    *,
    ood: Tensor | None = None,
    posterior: str | None = None,
    task: str | None = None,
    classes: Sequence[str] = (),
    factory: str = "",
    seed: int = 0,
    progress: Stages | None = None,
) -> NetworkModel:
    """Make trained networks distance-aware.

    In regression the noise level starts at the root mean square of the training residuals, and is refined on held-out
    data.

    Args:
        networks: one, or the members of a deep ensemble; all that follows runs on their device.
        train: what they were trained on.
        held_out: in-distribution data that they have not seen.
        ood: inputs away from the data, to choose φ on; by default held-out inputs that the model gets wrong.
        posterior: of one network, "last-layer" (default) or "laplace", of all its layers.
        task: "classification", "multi-label", "counts" or "regression"; by default whole numbers as targets are
            classes, and several zeros and ones an input are labels.
        classes: names of classes or labels, in the order of the outputs; by default 0, 1, ….
        factory: the name that the networks were made by.
        seed: of draws, and of the split of the held-out data.
        progress: told (stage, done, total).
    """
    if not networks:
        raise ValueError("Expected one network or more, got none")
    networks = [copy.deepcopy(network).eval() for network in networks]
    progress = progress or (lambda *_: None)
    device = next(networks[0].parameters()).device
    train, held_out = gather(on_device(train, device)[:2], "train"), gather(on_device(held_out, device)[:2], "held_out")
    check_tokens(networks[0], train.x, "train")
    one = outputs_at(networks[0], train.x[:2])[:1]
    check_inputs(held_out.x, "held_out", like=train.x)
    for name, x in (("held_out", held_out.x), *(() if ood is None else (("ood", ood),))):
        check_tokens(networks[0], x, name)
    is_named, task = task is not None, task or guessed_task(train.y)
    if task == "regression":
        train, held_out = (Labelled(data.x, data.y.to(one.dtype)) for data in (train, held_out))
    likelihood = likelihood_of(networks, train, task)
    if not is_named:
        refuse_doubtful(networks[0], train)
    names = _class_names(classes, likelihood, one.shape[1])
    train, held_out = (
        Labelled(data.x, likelihood.check(one.expand(len(data.x), -1), data.y)) for data in (train, held_out)
    )
    first = split(len(held_out.x), torch.Generator().manual_seed(seed))[0]
    chooses = held_out.subset(first.to(device))  # `calibrate` has the same half choose φ
    base = posterior_of(networks, likelihood, train, chooses, posterior, seed, progress)
    progress("calibrating", 0, 1)
    calibrated = calibrate(
        base,
        train=(train.x, train.y),
        held_out=(held_out.x, held_out.y),
        ood=None if ood is None else ood.to(device),
        seed=seed,
    )
    progress("calibrating", 1, 1)
    return model_of(calibrated, train, held_out, classes=names, factory=factory, seed=seed, progress=progress)


def model_of(
    calibrated: Calibrated,
    train: Labelled,
    held_out: Labelled,
    *,
    classes: Sequence[str] = (),
    factory: str = "",
    seed: int = 0,
    progress: Stages | None = None,
) -> NetworkModel:
    """What a calibration of a network gives, with its data as far as a file keeps them, and its quality.

    Args:
        calibrated: from `dapcal.calibrate`, of these data.
        train: its training data.
        held_out: its held-out data, all of them and in the same order.
        classes: their names, in the order of the outputs; by default 0, 1, ….
        factory: the name that the network was made by.
        seed: of the sample of held-out data that is kept.
        progress: told (stage, done, total).
    """
    likelihood, device = calibrated.posterior.likelihood, calibrated.example.device
    network = calibrated.posterior.network
    if network is None:
        raise ValueError("Expected the calibration of a network, got one of predictions alone; save that by itself")
    one = outputs_at(network, train.x[:1])
    train, held_out = (
        Labelled(data.x, likelihood.check(one.expand(len(data.x), -1), data.y)) for data in (train, held_out)
    )
    rows = _sampled(held_out, seed)
    return NetworkModel(
        calibrated,
        held_out if rows is None else held_out.subset(rows.to(device)),
        train if _bytes(train) <= kept.KEPT_BYTES else None,
        factory,
        _class_names(classes, likelihood, one.shape[1]),
        _quality(calibrated, held_out, progress or (lambda *_: None)),
        rows,
    )


def _class_names(classes: Sequence[str], likelihood: Likelihood, outputs: int) -> tuple[str, ...]:
    if likelihood.task == "regression":
        if classes:
            raise ValueError(f"Expected no `classes` in regression, got {len(classes)} names; leave them out")
        return ()
    count = outputs if likelihood.task == "multi-label" else max(outputs, 2)  # one logit is of two classes
    names = tuple(classes) or tuple(str(number) for number in range(count))
    if len(names) != count or len(set(names)) != count or not all(names):
        raise ValueError(f"Expected {count} different `classes` (the model's outputs), got {', '.join(names)}")
    return names


def _quality(calibrated: Calibrated, held_out: Labelled, progress: Stages) -> dict[str, float]:
    """Accuracy (over labels) or root mean square error, and NLLs before and after, where nothing was chosen."""
    assert calibrated.judges is not None  # it was calibrated a moment ago
    data = held_out.subset(calibrated.judges.to(held_out.x.device))
    likelihood = calibrated.posterior.likelihood
    sums, done = torch.zeros(3, dtype=torch.float64), 0
    for prediction, y in zip(calibrated.batches(data.x, _BATCH), data.y.cpu().split(_BATCH), strict=True):
        mean, decided = prediction.mean, likelihood.decisions(prediction.mean, y)
        good = (
            (mean - y).double().square().mean(-1)
            if decided is None
            else (decided.probs.argmax(-1) == decided.y).double().reshape(len(y), -1).mean(-1)
        )
        parts = (good, -prediction.base.log_prob(y), -prediction.log_prob(y))
        sums += torch.stack([part.double().sum() for part in parts])
        done += len(y)
        progress("measuring", done, len(data.x))
    first, before, after = (sums / len(data.x)).tolist()
    measured = {"rmse": first**0.5} if likelihood.task == "regression" else {"accuracy": first}
    return {**measured, "nll_before": before, "nll_after": after, "inputs": len(data.x)}


def _sampled(data: Labelled, seed: int) -> Tensor | None:
    """Rows of as many inputs as a file keeps, ascending; None where it keeps all."""
    most = max(1, min(kept.KEPT_HELD_OUT, kept.KEPT_BYTES * len(data.x) // _bytes(data)))
    if len(data.x) <= most:
        return None
    generator = torch.Generator().manual_seed(seed)
    split(len(data.x), generator)  # by the order that this draws, the sample would hold those that chose φ alone
    return torch.randperm(len(data.x), generator=generator)[:most].sort().values


def _bytes(data: Labelled) -> int:
    return sum(part.numel() * part.element_size() for part in (data.x, data.y))
