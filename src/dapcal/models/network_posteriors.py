"""From networks that are trained already to a posterior: one gets a Laplace approximation, several are an ensemble."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dapcal.data import Labelled
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, MultiLabel, Poisson
from dapcal.models.factories import told
from dapcal.networks import checked_outputs
from dapcal.posteriors import ensemble, laplace, plain
from dapcal.posteriors.network import NetworkPosterior
from dapcal.progress import Stages

TASKS = ("classification", "multi-label", "counts", "regression")
POSTERIORS = ("last-layer", "laplace")
_BATCH = 256


def posterior_of(
    networks: Sequence[nn.Module],
    likelihood: Likelihood,
    train: Labelled,
    chooses: Labelled,
    kind: str | None,
    seed: int,
    progress: Stages,
) -> NetworkPosterior:
    """A Laplace approximation of one network, of its last layer ("last-layer", default) or of all ("laplace").

    Its prior scale is the best for held-out data (`chooses`), or of all layers, where trying is slow, by the marginal
    likelihood. Several networks are the members of a deep ensemble, and have no `kind`.
    """
    if kind is not None and (kind not in POSTERIORS or len(networks) > 1):
        wanted = "left out (several networks are an ensemble)" if len(networks) > 1 else f"as {' or '.join(POSTERIORS)}"
        raise ValueError(f"Expected `posterior` {wanted}, got {kind!r}")
    if len(networks) > 1:
        return ensemble.of(networks, likelihood)
    network, data = networks[0], DataLoader(_Watched(train, progress), batch_size=None)
    if kind == "laplace":
        return laplace.fit(network, likelihood, data, prior_scale=laplace.MarginalLikelihood(), seed=seed)
    return plain.around(network, likelihood, train, chooses, seed, batches=data)


def likelihood_of(networks: Sequence[nn.Module], train: Labelled, task: str) -> Likelihood:
    """Classes of one logit or several, labels, counts, or targets with the noise of the training residuals."""
    outputs = outputs_at(networks[0], train.x[:2])
    if task == "regression":
        if train.y.numel() == len(train.y) and outputs.shape[1] > 1:
            raise ValueError(
                f"The model has {outputs.shape[1]} outputs, but there is one target for an input; if the targets are "
                "classes, save them as whole numbers, or name the task classification"
            )
        return Gaussian(plain.residual_noise(networks, train, outputs.shape[1]))
    if task == "multi-label":
        MultiLabel().check(outputs[:1].expand(len(train.y), -1), train.y)
        plain.refuse_squashed(networks[0], MultiLabel(), train)
        return MultiLabel()
    if task == "counts":
        return Poisson()
    if task != "classification":
        raise ValueError(f"Expected `task` as {', '.join(TASKS[:-1])} or {TASKS[-1]}, got {task!r}")
    one = outputs.shape[1] == 1
    likelihood: Likelihood = Bernoulli() if one else Categorical()
    labels = likelihood.check(outputs[:1].expand(len(train.y), -1), train.y)
    if len(labels.unique()) < 2:
        raise ValueError(f"Expected at least 2 classes in `train`, got class {int(labels[0])} alone; give all classes")
    plain.refuse_squashed(networks[0], likelihood, Labelled(train.x, labels))
    return likelihood


def guessed_task(y: Tensor) -> str:
    """Whole numbers are classes, and several zeros and ones an input are labels; one-hot rows are left in doubt.

    >>> guessed_task(torch.tensor([0, 1])), guessed_task(torch.tensor([0.5, 1.0]))
    ('classification', 'regression')
    >>> guessed_task(torch.tensor([[1, 1], [0, 1]])), guessed_task(torch.tensor([[1, 0], [0, 1]]))
    ('multi-label', 'classification')
    """
    if y.is_floating_point():
        return "regression"
    is_binary = y.ndim == 2 and y.shape[1] > 1 and bool(((y == 0) | (y == 1)).all())
    return "multi-label" if is_binary and not bool((y.sum(1) == 1).all()) else "classification"


def refuse_doubtful(network: nn.Module, train: Labelled) -> None:
    """Targets and outputs that `dapcal.calibrate` asks about, too; `guessed_task` sees the targets' type alone."""
    try:
        plain.kind_of(outputs_at(network, train.x[:_BATCH]), train.y)
    except ValueError as error:
        raise ValueError(
            f"Targets and outputs do not say what they are, so name the task, --task {', '.join(TASKS[:-1])} or "
            f"{TASKS[-1]} ({str(error).replace('Expected `likelihood`: ', '')})"
        ) from error


def outputs_at(network: nn.Module, x: Tensor) -> Tensor:
    """Outputs (N, C) of a network in evaluation mode; inputs that it cannot take are refused."""
    try:
        with torch.no_grad():
            outputs = network(x)
    except Exception as error:  # a network may raise anything
        raise ValueError(
            f"The model cannot run on inputs of shape {tuple(x.shape[1:])} and {x.dtype} ({told(error)}); check `x`"
        ) from error
    return checked_outputs(outputs, len(x))


class _Watched(Dataset):
    """Batches by their number, each reported as it is read."""

    def __init__(self, data: Labelled, progress: Stages) -> None:
        self.batches = list(zip(data.x.split(_BATCH), data.y.split(_BATCH), strict=True))
        self.progress = progress

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        self.progress("curvature", number + 1, len(self))
        return self.batches[number]
