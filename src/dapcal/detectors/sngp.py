"""SNGP: a spectrally normalised network under a Gaussian process of random Fourier features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dapcal.data import Data, Labelled, gather, in_memory, size
from dapcal.detectors.spectral import normalised, plain
from dapcal.distances.projectors import FourierFeatures, median_distance, project
from dapcal.likelihoods import Categorical
from dapcal.networks import as_tensor, frozen_copy
from dapcal.posteriors._training import checkpoints
from dapcal.posteriors._training.checks import check_network
from dapcal.posteriors._training.log_joint import training_mode
from dapcal.posteriors._training.trainer import minimise
from dapcal.posteriors.training import Options, Training

BATCH = 512  # inputs per forward pass
SAMPLE = 1024  # training inputs that the length scale is taken from


def fit(
    body: nn.Module,
    classes: int,
    train: Data,
    *,
    bound: float = 3.0,
    dimension: int = 1024,
    length_scale: float | None = None,
    layer_norm: bool = False,
    ridge: float = 1.0,
    weighted: bool = False,
    mean_field: float = math.pi / 8,
    seed: int = 0,
    **options: Unpack[Options],
) -> SNGP:
    """Train logits φ(h(x))ᵀβ_k by the log joint, then take the Laplace covariance of β.

    Liu et al. (2020), arXiv:2006.10108. h is the body with spectrally normalised layers, φ are D random Fourier
    features of a Gaussian kernel and β_k ~ N(0, I/ridge). The precision of β is an exact sum over the training inputs,
    in one pass after training, where the paper adds up the minibatches of the last epoch while the body still moves.

    Args:
        body: from inputs to features (N, P), which are flattened; left as it is.
        classes: K.
        train: (inputs, labels), a Dataset or a DataLoader (which is also read into memory once).
        bound: largest spectral norm of the body's layers; the paper has 0.95 to 6.
        dimension: D.
        length_scale: of the kernel; by default the median distance between features before training.
        layer_norm: LayerNorm before φ, as the authors' code has it for images. Off, since it takes away the length of
            the features, and with it the distance along one direction.
        ridge: prior precision of β.
        weighted: the paper's precision, one per class; the authors' code has one for all, as of a regression.
        mean_field: λ in logits/√(1 + λ variance). The authors' code tunes it (20 to 25 on CIFAR-10).
        seed: of frequencies, batches and dropout.
        options: epochs, learning rate and all else of `dapcal.posteriors.training.Training`. The held-out NLL is that
            of the logits without variance.
    """
    check_network(body)
    if classes < 2 or dimension < 1:
        raise ValueError(f"Expected `classes` >= 2 and `dimension` >= 1, got {classes} and {dimension}")
    if not ridge > 0 or not mean_field >= 0 or (length_scale is not None and not length_scale > 0):
        raise ValueError(
            "Expected `ridge` > 0, `mean_field` >= 0 and `length_scale` > 0 (or None), got "
            f"{ridge}, {mean_field} and {length_scale}"
        )
    training = Training(**options)
    data = in_memory(train, "train")
    seen = data if isinstance(data, Labelled) else gather(data, "train")
    generator = torch.Generator().manual_seed(seed)
    start = normalised(body, bound, last=True, example=seen.x[:1])
    network = _network(start, seen.x, classes, dimension, length_scale, layer_norm, generator)
    count = size(data)

    def nll(x: Tensor, y: Tensor) -> Tensor:
        with training.autocast(network.weight.device):
            features = network.features(x)
        logits = network.fourier(features) @ network.weight
        return cross_entropy(logits, Categorical().check(logits, y.to(logits.device)))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nll(x, y) + ridge / (2 * count) * (network.weight**2).sum()

    def held_out_nll(x: Tensor, y: Tensor) -> Tensor:
        network.eval()
        value = nll(x, y)
        training_mode(network)
        return value

    minimise(
        loss,
        [p for p in network.parameters() if p.requires_grad],
        dict([*network.named_parameters(), *network.named_buffers()]),
        data,
        training=training,
        generator=generator,
        method="SNGP",
        settings={
            "body": checkpoints.of_model(body, start=False), "bound": bound, "length_scale": length_scale,
            "layer_norm": layer_norm, "ridge": ridge,
        },
        held_out_nll=held_out_nll,
    )  # fmt: skip
    network.body = plain(network.body)
    network.eval().requires_grad_(False)
    return SNGP(network, torch.linalg.cholesky(precision(network, seen.x, ridge, weighted)), mean_field)


@dataclass(frozen=True, eq=False)
class SNGP:
    """p = softmax(m/√(1 + λ v)) with m_k = φᵀβ_k and v_k = φᵀΣ_kφ.

    Attributes:
        network: from inputs to φ, with β as its `weight` (D, K).
        cholesky: lower factor of the precision Σ⁻¹, of each class or of all, (K, D, D) or (1, D, D) in float64.
        mean_field: λ.
    """

    network: _Network
    cholesky: Tensor
    mean_field: float

    def __call__(self, x: Tensor) -> Tensor:
        """K/(K + Σ_k exp(logit_k)), (N,): Dempster-Shafer, the paper's score, which keeps the size of the logits."""
        logits = self.logits(x)
        return torch.sigmoid(math.log(logits.shape[1]) - logits.logsumexp(1))

    def probs(self, x: Tensor) -> Tensor:
        """Class probabilities, (N, K)."""
        return self.logits(x).softmax(1)

    def logits(self, x: Tensor) -> Tensor:
        """Mean-field logits, (N, K)."""
        return project(self._logits, x, BATCH)

    def variance(self, x: Tensor) -> Tensor:
        """v, (N, K), or (N, 1) where all classes have one precision."""
        return project(lambda batch: self._variance(self.network(batch)), x, BATCH)

    def _logits(self, x: Tensor) -> Tensor:
        fourier = self.network(x)
        return fourier @ self.network.weight / (1 + self.mean_field * self._variance(fourier)).sqrt()

    def _variance(self, fourier: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(self.cholesky, fourier.T.to(self.cholesky), upper=False)  # (K, D, N)
        return (half**2).sum(1).T.to(fourier)


def precision(network: _Network, x: Tensor, ridge: float, weighted: bool) -> Tensor:
    """Σ_k⁻¹ = ridge I + Σ_i w_ik φ_i φ_iᵀ, (K, D, D) with w = p (1 − p), or (1, D, D) with w = 1; in float64."""
    dimension, classes = network.weight.shape
    total = torch.zeros(
        classes if weighted else 1, dimension, dimension, dtype=torch.float64, device=network.weight.device
    )
    with torch.no_grad():
        for batch in x.split(BATCH):
            fourier = network(batch)
            probs = (fourier @ network.weight).softmax(1)
            for part, p in zip(total, probs.T, strict=False):
                part += (fourier.T * (p * (1 - p)) if weighted else fourier.T) @ fourier
    return total + ridge * torch.eye(dimension).to(total)


class _Network(nn.Module):
    """From inputs to φ = √(2/D) cos(Wᵀh/ℓ + b); β is its `weight`, and what was drawn are buffers."""

    frequencies: Tensor  # W/ℓ, (P, D)
    phases: Tensor  # b, (D,)

    def __init__(self, body: nn.Module, norm: nn.Module, frequencies: Tensor, phases: Tensor, classes: int) -> None:
        super().__init__()
        self.body, self.norm = body, norm
        self.register_buffer("frequencies", frequencies)
        self.register_buffer("phases", phases)
        self.weight = nn.Parameter(frequencies.new_zeros(len(phases), classes))

    def features(self, x: Tensor) -> Tensor:
        """What the body says, (N, P)."""
        return as_tensor(self.body(x.to(self.weight.device))).flatten(1)

    def fourier(self, features: Tensor) -> Tensor:
        """φ, (N, D)."""
        return FourierFeatures(self.frequencies, self.phases)(self.norm(features.to(self.weight)))

    def forward(self, x: Tensor) -> Tensor:
        return self.fourier(self.features(x))


def _network(
    body: nn.Module,
    x: Tensor,
    classes: int,
    dimension: int,
    length_scale: float | None,
    layer_norm: bool,
    generator: torch.Generator,
) -> _Network:
    """What training starts from; the body is taken, not copied."""
    probe = frozen_copy(body)
    device = next((p.device for p in probe.parameters()), x.device)
    sample = x[torch.randperm(len(x), generator=generator)[:SAMPLE]]
    features = project(lambda batch: as_tensor(probe(batch.to(device))).flatten(1), sample)
    norm = nn.LayerNorm(features.shape[1]).to(features) if layer_norm else nn.Identity()
    length = median_distance(norm(features).detach(), generator) if length_scale is None else length_scale
    frequencies = torch.randn(features.shape[1], dimension, generator=generator) / length
    phases = 2 * math.pi * torch.rand(dimension, generator=generator)
    network = _Network(body, norm, frequencies.to(features), phases.to(features), classes)
    training_mode(network)
    return network
