"""Variational inference: flipout against shared noise, KL warm-up, collapse, resuming with all of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from cases import KnownNoise
from dapcal.likelihoods import Categorical
from dapcal.networks import frozen_copy
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors import variational
from dapcal.posteriors._training.flipout import Flipout
from dapcal.types import DapcalWarning


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))


class Killed(Exception):
    pass


# Flipout


class Positions(nn.Module):
    """Linear layers over positions of a sequence, (N, T, D), and over positions laid side by side, (N T, D)."""

    def __init__(self, side_by_side: bool) -> None:
        super().__init__()
        self.side_by_side = side_by_side
        self.inner, self.outer = nn.Linear(1, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 1) if self.side_by_side else x[:, :, None]
        return self.outer(self.inner(rows).tanh().reshape(len(x), -1, 4).prod(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2, padding=1, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)
    ),
    "grouped": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)
    ),
    "normed": lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)),
    "positions": lambda: Positions(False),
    "side by side": lambda: Positions(True),
}


def estimates(name: str, repeats: int) -> tuple[Tensor, Tensor]:
    """Gradients of the expected loss by means and scales, (repeats, 2P), by flipout and by shared noise."""
    module = frozen_copy(NETWORKS[name]())
    x, y = torch.randn(24, 4), torch.arange(24) % 3
    flipped = Flipout(module, {}, x[:1])
    mean = {n: p.clone().requires_grad_() for n, p in module.named_parameters()}
    scale = {n: torch.full_like(p, 0.5).requires_grad_() for n, p in mean.items()}

    def gradient(forward: Callable[[dict, Tensor], Tensor]) -> Tensor:
        noise = {n: torch.randn_like(p) * scale[n] for n, p in mean.items()}
        loss = nn.functional.cross_entropy(forward(noise, x), y)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*mean.values(), *scale.values()])])

    def shared(noise: dict, x: Tensor) -> Tensor:
        return functional_call(module, {n: p + noise[n] for n, p in mean.items()}, (x,))

    own = torch.stack([gradient(lambda noise, x: flipped(mean, noise, x)) for _ in range(repeats)])
    return own, torch.stack([gradient(shared) for _ in range(repeats)])


@pytest.mark.parametrize("name", NETWORKS)
def test_flipouts_gradient_is_unbiased(name):
    """Means of many estimates agree within five standard errors, all parameters together and each for itself."""
    own, shared = estimates(name, 300)
    error = ((own.var(0) + shared.var(0)) / 300).sqrt()
    z = (own.mean(0) - shared.mean(0)) / error.clamp_min(1e-9)
    assert z.abs().max() < 5
    assert z.square().mean() < 1.6


@pytest.mark.parametrize("name", ["mlp", "cnn", "grouped", "normed"])
def test_flipouts_gradient_varies_less(name):
    own, shared = estimates(name, 200)
    assert own.var(0).sum() < 0.8 * shared.var(0).sum()


def test_inputs_of_a_minibatch_see_noise_of_their_own():
    module = frozen_copy(NETWORKS["mlp"]())
    mean = dict(module.named_parameters())
    noise = {n: torch.randn_like(p) for n, p in mean.items()}
    x = torch.randn(1, 4).repeat(50, 1)
    outputs = Flipout(module, {}, x)(mean, noise, x)
    assert len(outputs.unique(dim=0)) > 20


class Odd(nn.Module):
    """Layers that take no part: one runs twice, two share a weight, one is frozen, one is a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.frozen = nn.Linear(4, 3).requires_grad_(False)
        self.idle = nn.Linear(4, 4)
        self.bare = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.twice(self.twice(x).tanh()))
        return self.frozen(self.two(self.one(x).tanh()).tanh()) * self.bare


def test_other_parameters_share_their_noise():
    model = Odd()
    module = frozen_copy(model)
    random = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    shared = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}
    flipped = Flipout(module, shared, torch.randn(1, 4))
    assert flipped.layers == {}
    noise = {n: torch.randn_like(p) for n, p in random.items()}
    x = torch.randn(6, 4)
    expected = functional_call(module, {**shared, **{n: p + noise[n] for n, p in random.items()}}, (x,))
    assert torch.equal(flipped(random, noise, x), expected)
    assert all(len(m._forward_hooks) == 0 for m in module.modules())


def test_a_network_with_such_layers_is_fitted(blobs):
    x, y = blobs[0]
    wide = torch.cat([x, x.flip(1)], 1)
    posterior = variational.fit(Odd(), Categorical(), (wide, y), flipout=True, epochs=2)
    assert posterior.outputs(wide).isfinite().all()


def test_flipout_finds_the_mean_field_optimum_of_a_linear_model(generator):
    """Mean exact; variances 1/diag(precision); test_conjugate.py has four samples a step."""
    x = torch.randn(60, 2, generator=generator)
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    y = x @ torch.tensor([1.0, -0.5]) + 0.5 * torch.randn(60, generator=generator)
    precision = x.T @ x / 0.25 + torch.eye(2) / 1.5**2
    posterior = variational.fit(
        nn.Linear(2, 1, bias=False), KnownNoise(0.5), (x, y), prior_scale=1.5, flipout=True, epochs=800,
        learning_rate=0.05, batch_size=60,
    )  # fmt: skip
    exact = precision.diagonal().rsqrt()
    mean = torch.linalg.solve(precision, x.T @ y / 0.25)
    assert ((posterior.gaussian.mean - mean).abs() < 0.2 * exact).all()
    torch.testing.assert_close(posterior.gaussian.variance.sqrt(), exact, rtol=0.1, atol=0)


def test_flipout_classifies(blobs):
    posterior = variational.fit(network(), Categorical(), blobs[0], flipout=True, epochs=60, learning_rate=0.02)
    x, y = blobs[1]
    assert (posterior.outputs(x).softmax(-1).mean(0).argmax(-1) == y).double().mean() > 0.95


def test_flipout_in_bfloat16(blobs):
    posterior = variational.fit(network(), Categorical(), blobs[0], flipout=True, epochs=2, bf16=True)
    assert posterior.draws.isfinite().all()


@pytest.mark.parametrize("loader", [False, True])
def test_flipout_is_seeded_and_leaves_the_global_generator_alone(blobs, loader):
    def fit(seed: int) -> Tensor:
        data = TensorDataset(*blobs[0])
        train = DataLoader(data, batch_size=32, shuffle=True) if loader else data
        return variational.fit(network(), Categorical(), train, flipout=True, epochs=2, seed=seed).draws

    before = torch.random.get_rng_state()
    one, two, three = fit(0), fit(0), fit(1)
    assert torch.equal(one, two)
    assert not torch.equal(one, three)
    assert torch.equal(torch.random.get_rng_state(), before)


# KL warm-up


@pytest.mark.parametrize(("warm_up", "kl_weight"), [(0, 1.0), (1, 1.0), (3, 0.5)])
def test_the_weight_of_the_kl_rises_over_the_warm_up(blobs, warm_up, kl_weight):
    """A tiny σ and no steps to speak of leave NLL and KL as they are, so each epoch's loss shows the weight."""
    losses: list[float] = []
    model = network().double()
    x, y = blobs[0][0].double(), blobs[0][1]
    variational.fit(
        model, Categorical(), (x, y), warm_up=warm_up, kl_weight=kl_weight, initial_scale=1e-6, epochs=5,
        learning_rate=1e-12, batch_size=30, progress=lambda epoch: losses.append(epoch.loss),
    )  # fmt: skip
    mean = torch.cat([p.detach().flatten() for p in model.parameters()])
    kl = 0.5 * (mean**2 + 1e-12 - 1 - math.log(1e-12)).sum().item()
    nll = nn.functional.cross_entropy(model(x), y).item()
    for epoch, loss in enumerate(losses):
        steps = [epoch * 5 + step for step in range(1, 6)]
        weights = [min(1.0, step / (5 * warm_up)) if warm_up else 1.0 for step in steps]
        assert loss == pytest.approx(nll + kl_weight * sum(weights) / 5 * kl / 150, rel=1e-4)


def test_a_negative_warm_up_is_refused(blobs):
    with pytest.raises(ValueError, match="`warm_up` >= 0"):
        variational.fit(network(), Categorical(), blobs[0], warm_up=-1)


# Collapse


def test_a_collapse_onto_the_prior_is_told(blobs):
    x, y = blobs[0]
    wide = nn.Sequential(nn.Linear(2, 200), nn.Tanh(), nn.Linear(200, 3))
    with pytest.warns(DapcalWarning, match=r"collapsed onto the prior: \d+% .*smaller `kl_weight`"):
        variational.fit(wide, Categorical(), (x[:6], y[:6]), kl_weight=100.0, epochs=800, learning_rate=0.05)


def test_no_collapse_where_data_teach_the_network(blobs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        variational.fit(network(), Categorical(), blobs[0], epochs=60, learning_rate=0.02)


# Resuming


@pytest.mark.parametrize("loader", [False, True])
@pytest.mark.parametrize("at_epoch", [2, 5])
def test_flipout_and_warm_up_resume(tmp_path, blobs, at_epoch, loader):
    options = {"flipout": True, "warm_up": 4, "samples": 2, "epochs": 8, "batch_size": 32}

    def fit(**more):
        data = TensorDataset(*blobs[0])
        train = DataLoader(data, batch_size=32, shuffle=True) if loader else data
        start = map_posterior.point(network(), Categorical()).network
        return variational.fit(start, Categorical(), train, **options, **more)

    def stop(epoch) -> None:
        if epoch.number == at_epoch:
            raise Killed

    reference = fit()
    with pytest.raises(Killed):
        fit(checkpoint=tmp_path / "run", checkpoint_seconds=0, progress=stop)
    resumed = fit(checkpoint=tmp_path / "run")
    assert torch.equal(resumed.draws, reference.draws)
    assert torch.equal(resumed.gaussian.variance, reference.gaussian.variance)
