"""DUE: a sparse variational Gaussian process on the features of a spectrally normalised network."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss
from torch.optim import Optimizer

from dapcal.data import Data, Labelled, gather, in_memory, size
from dapcal.detectors.spectral import normalised, plain
from dapcal.distances.projectors import project
from dapcal.likelihoods import Categorical
from dapcal.networks import as_tensor, frozen_copy
from dapcal.posteriors._training import checkpoints
from dapcal.posteriors._training.checks import check_network
from dapcal.posteriors._training.log_joint import training_mode
from dapcal.posteriors._training.trainer import minimise
from dapcal.posteriors.training import Options, Training

BATCH = 512  # inputs per forward pass
SAMPLE = 1000  # training inputs whose features start the inducing points and the length scale


def fit(
    body: nn.Module,
    classes: int,
    train: Data,
    *,
    bound: float = 3.0,
    inducing: int = 50,
    faster: float = 10.0,
    samples: int = 32,
    seed: int = 0,
    **options: Unpack[Options],
) -> DUE:
    """Maximise E_q[log softmax(f(h(x)))_y] − KL(q(u) ‖ p(u))/N over the body, kernels, inducing points and q.

    van Amersfoort et al. (2021), arXiv:2102.11409. h is the body with spectrally normalised layers; each class has a
    Gaussian process f_c of its own (constant mean, scaled Gaussian kernel) at inducing points that the classes share.
    They start at the centres of k-means of features, the length scale at the features' mean distance. By GPyTorch
    (Gardner et al. 2018, arXiv:1809.11165).

    Args:
        body: from inputs to features (N, P), which are flattened; left as it is.
        classes: K.
        train: (inputs, labels), a Dataset or a DataLoader.
        bound: largest spectral norm of the body's layers.
        inducing: number of inducing points. The paper has K, under deep residual networks; small bodies need more.
        faster: learning rate of the process in units of the body's. q's means are whitened and have far to go: with one
            rate for all, a low one leaves them behind and a high one breaks the body.
        samples: of f that probabilities are averaged over.
        seed: of inducing points, batches, dropout and samples.
        options: epochs, learning rate and all else of `dapcal.posteriors.training.Training`.
    """
    gpytorch = _gpytorch()
    check_network(body)
    if classes < 2 or samples < 1 or not faster > 0:
        raise ValueError(
            f"Expected `classes` >= 2, `samples` >= 1 and `faster` > 0, got {classes}, {samples} and {faster}"
        )
    training = Training(**options)
    data = in_memory(train, "train")
    seen = data if isinstance(data, Labelled) else gather(data, "train")
    if not 1 <= inducing <= len(seen.x):
        raise ValueError(f"Expected `inducing` between 1 and {len(seen.x)} (training inputs), got {inducing}")
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(samples, 1, classes, generator=generator)
    start = normalised(body, bound, last=True, example=seen.x[:1])
    network = _network(start, seen.x, classes, inducing, generator)
    device = network.device
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=classes, mixing_weights=False)
    bound_of = gpytorch.mlls.VariationalELBO(likelihood, network.process, num_data=size(data))

    def two_rates(_: list[Tensor], rate: float) -> Optimizer:
        optimizer = training.optimizer(_learnt(network.process), faster * rate)
        if _learnt(network.body):
            optimizer.add_param_group({"params": _learnt(network.body), "lr": rate})
        return optimizer

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with training.autocast(device):
            features = network.features(x)
        latent = network.latent(features)
        return -bound_of(latent, Categorical().check(latent.mean, y.to(device)))

    def held_out_nll(x: Tensor, y: Tensor) -> Tensor:
        network.eval()
        probs = DUE(network, noise.to(device)).probs(x)
        training_mode(network)
        return nll_loss(probs.log(), Categorical().check(probs, y.to(device)))

    minimise(
        loss,
        _learnt(network),
        dict([*network.named_parameters(), *network.named_buffers()]),
        data,
        training=replace(training, optimizer=two_rates),
        generator=generator,
        method="DUE",
        settings={"body": checkpoints.of_model(body, start=False), "bound": bound, "faster": faster},
        held_out_nll=held_out_nll,
    )
    network.body = plain(network.body)
    return DUE(network.eval().requires_grad_(False), noise.to(device))


@dataclass(frozen=True, eq=False)
class DUE:
    """p = mean over samples of softmax(f), f_c ~ N(m_c(x), v_c(x)).

    Attributes:
        network: from inputs to the latent means and deviations, (N, 2 K).
        noise: standard normal samples (S, 1, K), the same for every input.
    """

    network: nn.Module
    noise: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Entropy of the probabilities, (N,)."""
        return torch.special.entr(self.probs(x)).sum(1)

    def probs(self, x: Tensor) -> Tensor:
        """Class probabilities, (N, K)."""
        mean, deviation = project(self.network, x, BATCH).chunk(2, 1)
        drawn = mean + deviation * self.noise.to(mean)  # (S, N, K)
        return drawn.softmax(-1).mean(0)


class _Network(nn.Module):
    """From inputs to means and standard deviations of f."""

    def __init__(self, body: nn.Module, process: nn.Module) -> None:
        super().__init__()
        self.body, self.process = body, process

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return next(self.process.parameters()).device

    def features(self, x: Tensor) -> Tensor:
        """What the body says, (N, P)."""
        return as_tensor(self.body(x.to(self.device))).flatten(1)

    def latent(self, features: Tensor) -> Any:
        """f as GPyTorch's distribution over (N, K)."""
        return self.process(features.to(next(self.process.parameters())))

    def forward(self, x: Tensor) -> Tensor:
        latent = self.latent(self.features(x))
        return torch.cat([latent.mean, latent.stddev], 1)


def _learnt(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


def _network(body: nn.Module, x: Tensor, classes: int, inducing: int, generator: torch.Generator) -> _Network:
    """What training starts from; the body is taken, not copied."""
    probe = frozen_copy(body)
    device = next((p.device for p in probe.parameters()), x.device)
    sample = x[torch.randperm(len(x), generator=generator)[: max(SAMPLE, inducing)]]
    features = project(lambda batch: as_tensor(probe(batch.to(device))).flatten(1), sample)
    length = float(torch.pdist(features[:SAMPLE]).mean()) or 1.0
    network = _Network(body, _process(centres(features, inducing, generator), length, classes).to(features))
    training_mode(network)
    return network


def centres(points: Tensor, count: int, generator: torch.Generator, rounds: int = 50) -> Tensor:
    """k-means of points (N, P) by Lloyd's rounds from k-means++ (Arthur, Vassilvitskii 2007): (count, P)."""
    chosen = [int(torch.randint(len(points), (1,), generator=generator))]
    squared = (points - points[chosen[0]]).square().sum(1)  # to the nearest centre
    while len(chosen) < count:
        odds = squared.cpu().double()
        odds = odds if odds.sum() > 0 else torch.ones_like(odds)  # fewer distinct points than centres
        chosen.append(int(torch.multinomial(odds, 1, generator=generator)))
        squared = torch.minimum(squared, (points - points[chosen[-1]]).square().sum(1))
    found = points[chosen]
    for _ in range(rounds):
        nearest = torch.cdist(points, found).argmin(1)
        sums = torch.zeros_like(found).index_add_(0, nearest, points)
        sizes = nearest.bincount(minlength=count)[:, None]
        found = torch.where(sizes > 0, sums / sizes.clamp_min(1), found)
    return found


def _process(inducing: Tensor, length_scale: float, classes: int) -> nn.Module:
    """Independent processes of the classes; GPyTorch is asked for only here."""
    gp = _gpytorch()
    batch = torch.Size([classes])

    class Process(gp.models.ApproximateGP):  # type: ignore[name-defined]
        def __init__(self) -> None:
            own = gp.variational.CholeskyVariationalDistribution(len(inducing), batch_shape=batch)
            shared = gp.variational.VariationalStrategy(self, inducing, own)
            super().__init__(gp.variational.IndependentMultitaskVariationalStrategy(shared, num_tasks=classes))
            kernel = gp.kernels.RBFKernel(batch_shape=batch)
            kernel.lengthscale = length_scale
            self.mean_module = gp.means.ConstantMean(batch_shape=batch)
            self.covar_module = gp.kernels.ScaleKernel(kernel, batch_shape=batch)

        def forward(self, features: Tensor) -> Any:
            return gp.distributions.MultivariateNormal(self.mean_module(features), self.covar_module(features))

    return Process()


def _gpytorch() -> ModuleType:
    try:
        with warnings.catch_warnings():
            # its linear operators are annotated by torch.jit, which torch has deprecated
            warnings.filterwarnings("ignore", message=r"`torch\.jit", category=DeprecationWarning)
            import gpytorch
    except ImportError as error:
        raise ImportError("DUE needs gpytorch; install it with: pip install 'dapcal[due]'") from error
    return gpytorch
