"""VOGN: its fixed point on a linear model, quadrature on a logistic one, gradients one by one, resuming."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import dapcal
from cases import Fragile, Killed, KnownNoise
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, MeanAndNoise, NoiseHead
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors import vogn
from dapcal.posteriors.training import constant
from dapcal.progress import Epoch
from dapcal.types import DapcalWarning


def line(n: int = 60):
    """A linear regression of two correlated inputs with noise 0.5."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator)
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    return x, x @ torch.tensor([1.0, -0.5]) + 0.5 * torch.randn(n, generator=generator)


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def small(model: type[nn.Module], *arguments) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(*arguments)


class Branching(nn.Module):
    """A network whose control flow looks at activations, which vmap cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return out if out.sum() > 0 else 2 * out


# Gradients


class Convolutional(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 1, 2)), nn.Conv2d(1, 4, (1, 2)), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
            nn.Linear(4, 3),
        )  # fmt: skip


@pytest.mark.parametrize("make", [network, Convolutional, Branching])
@pytest.mark.parametrize("memory", [1, 2**12, 2**28])
def test_moments_of_gradients_are_those_of_a_loop(blobs, monkeypatch, make, memory):
    monkeypatch.setattr(vogn, "MEMORY", memory)
    x, y = (part[:7] for part in blobs[0])
    model = small(make).eval().double()
    x = x.double()
    layout = dapcal.networks.layout_of(dict(model.named_parameters()))
    vector = layout.flatten(dict(model.named_parameters())).detach()

    def loss(theta: Tensor, a: Tensor, b: Tensor) -> Tensor:
        outputs = functional_call(model, layout.unflatten(theta), (a[None],))
        return -Categorical().log_likelihood(outputs, b[None]).sum()

    mean, square = vogn.gradient_moments(loss, vector, x, y)
    each = []
    for a, b in zip(x, y, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(a[None]), b[None]).backward()
        each.append(layout.flatten({n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(mean, torch.stack(each).mean(0))
    torch.testing.assert_close(square, torch.stack(each).square().mean(0))


def test_the_first_step_by_hand():
    x, y = (part.double() for part in line())
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, 1.0]]))
    posterior = vogn.fit(
        model, KnownNoise(0.5), (x, y), prior_scale=1.5, kl_weight=0.5, damping=0.3, initial_scale=1e-9, epochs=1,
        learning_rate=0.7, batch_size=60, schedule=constant,
    )  # fmt: skip
    theta, delta = np.array([2.0, 1.0]), 0.5 / (60 * 1.5**2)
    gradients = -(y.numpy() - x.numpy() @ theta)[:, None] * x.numpy() / 0.25
    h = (gradients**2).mean(0)
    expected = theta - 0.7 * (gradients.mean(0) + delta * theta) / (h + delta + 0.3)
    np.testing.assert_allclose(posterior.gaussian.mean, expected, rtol=1e-6)
    np.testing.assert_allclose(posterior.gaussian.variance, 0.5 / (60 * (h + delta)), rtol=1e-6)


# Where it goes


def fixed_point(x: Tensor, y: Tensor, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variances with 1/v = Σ_n E_q[g_n²]/τ + 1/σ0², E_q[g_nj²] = x_nj² (r_n² + Σ_k x_nk² v_k)/noise⁴."""
    a, b = x.double().numpy(), y.double().numpy()
    mean = np.linalg.solve(a.T @ a / 0.25 + tau * np.eye(2) / 1.5**2, a.T @ b / 0.25)
    v = np.ones(2)
    for _ in range(2000):
        second = (b - a @ mean) ** 2 + a**2 @ v
        v = 1 / ((a**2 * second[:, None]).sum(0) / 0.0625 / tau + 1 / 1.5**2)
    return mean, v


@pytest.mark.parametrize(("tau", "damping"), [(1.0, 1e-3), (1.0, 1.0), (0.2, 1e-3)])
def test_the_fixed_point_on_a_linear_model(tau, damping):
    """The exact posterior's mean, and the empirical Fisher's variances; damping does not move either."""
    x, y = line()
    posterior = vogn.fit(
        small(nn.Linear, 2, 1, False), KnownNoise(0.5), (x, y), prior_scale=1.5, kl_weight=tau, damping=damping,
        curvature_rate=0.02, epochs=300, batch_size=20,
    )  # fmt: skip
    mean, variance = fixed_point(x, y, tau)
    np.testing.assert_array_less(np.abs(posterior.gaussian.mean.numpy() - mean) / np.sqrt(variance), 0.1)
    np.testing.assert_allclose(posterior.gaussian.variance, variance, rtol=0.05)


def test_a_logistic_model_against_quadrature():
    """Posterior mean of two weights by a sum over a grid."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 2, generator=generator)
    y = (x @ torch.tensor([1.5, -1.0]) + torch.randn(40, generator=generator) > 0).long()
    posterior = vogn.fit(
        small(nn.Linear, 2, 1, False), Bernoulli(), (x, y), prior_scale=2.0, epochs=400, batch_size=40, samples=2
    )
    axis = torch.linspace(-6, 8, 400, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    logits = x.double() @ grid.T
    sign = 2 * y.double()[:, None] - 1
    log_joint = nn.functional.logsigmoid(sign * logits).sum(0) - (grid**2).sum(1) / 8
    weight = log_joint.softmax(0)
    mean = weight @ grid
    deviation = (weight @ (grid - mean) ** 2).sqrt()
    assert ((posterior.gaussian.mean - mean).abs() < 0.2 * deviation).all()
    ratio = posterior.gaussian.variance.sqrt() / deviation
    assert ((ratio > 0.7) & (ratio < 1.1)).all()


@pytest.mark.parametrize("loader", [False, True])
def test_it_classifies_and_calibrates(blobs, loader):
    (x, y), (x_new, y_new) = blobs
    train = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True) if loader else (x, y)
    start = map_posterior.fit(network(), Categorical(), (x, y), epochs=20, learning_rate=0.02).network
    epochs: list[Epoch] = []
    posterior = vogn.fit(
        start, Categorical(), train, epochs=20, batch_size=32, held_out=(x_new, y_new), progress=epochs.append
    )
    probabilities = posterior.outputs(x_new).softmax(-1).mean(0)
    assert (probabilities.argmax(-1) == y_new).double().mean() > 0.95
    assert epochs[-1].loss < epochs[0].loss
    noise = torch.randn(10, len(posterior.center), generator=torch.Generator().manual_seed(1))
    outputs = posterior.outputs_at(posterior.center + noise * posterior.gaussian.variance.sqrt(), x_new)
    nll = nn.functional.nll_loss(outputs.softmax(-1).mean(0).log(), y_new).item()
    assert epochs[-1].held_out_nll == pytest.approx(nll, rel=1e-4)
    assert torch.equal(posterior.shared["1.running_mean"], start[1].running_mean)
    assert torch.equal(posterior.center, posterior.gaussian.mean)
    calibrated = dapcal.calibrate(posterior, train=(x, y), held_out=(x_new, y_new), ood=3 * x_new)
    far = torch.tensor([[6.0, -6.0]])
    assert calibrated(far).probs.max() < posterior.outputs(far).softmax(-1).mean(0).max()


def test_a_noise_head(generator):
    x = 4 * torch.rand(300, 1, generator=generator) - 2
    y = x[:, 0] + torch.where(x[:, 0] > 0, 1.0, 0.2) * torch.randn(300, generator=generator)
    model = small(lambda: MeanAndNoise(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))))
    start = map_posterior.fit(model, NoiseHead(), (x, y), epochs=60, learning_rate=0.03, prior_scale=3.0).network
    posterior = vogn.fit(start, NoiseHead(), (x, y), epochs=40, prior_scale=3.0)
    conditional = posterior.likelihood.conditional(posterior.outputs(torch.tensor([[-1.5], [1.5]])))
    low, high = conditional.variance.mean(0)[:, 0].sqrt().tolist()
    assert low == pytest.approx(0.2, abs=0.1)
    assert high == pytest.approx(1.0, abs=0.3)


def test_a_model_that_vmap_cannot_run(blobs):
    posterior = vogn.fit(small(Branching), Categorical(), blobs[0], epochs=10, batch_size=50)
    x, y = blobs[1]
    assert (posterior.network(x).argmax(-1) == y).double().mean() > 0.9


def test_the_likelihood_is_held():
    x, y = line()
    likelihood = Gaussian(0.7)
    assert vogn.fit(nn.Linear(2, 1), likelihood, (x, y), epochs=2).likelihood == likelihood


def test_collapse_is_told():
    x, y = line(4)
    with pytest.warns(DapcalWarning, match="collapsed onto the prior"):
        vogn.fit(
            small(lambda: nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))), KnownNoise(5.0), (x, y),
            kl_weight=100.0, epochs=300, learning_rate=0.3,
        )  # fmt: skip


def test_patience_goes_back_to_the_best_epoch(blobs):
    epochs: list[Epoch] = []
    options = {"learning_rate": 0.5, "batch_size": 32, "schedule": constant, "held_out": blobs[1]}
    stopped = vogn.fit(network(), Categorical(), blobs[0], epochs=60, patience=4, progress=epochs.append, **options)
    nll = [epoch.held_out_nll for epoch in epochs]
    best = nll.index(min(nll))
    assert len(nll) == best + 1 + 4 < 60
    again = vogn.fit(network(), Categorical(), blobs[0], epochs=best + 1, **options)
    assert torch.equal(stopped.gaussian.mean, again.gaussian.mean)
    assert torch.equal(stopped.gaussian.variance, again.gaussian.variance)


def test_the_schedule_steps_with_every_minibatch(blobs):
    rates: list[float] = []

    def schedule(optimizer, steps):
        def share(step: int) -> float:
            rates.append(step / steps)
            return 1.0

        return torch.optim.lr_scheduler.LambdaLR(optimizer, share)

    vogn.fit(network(), Categorical(), blobs[0], epochs=3, batch_size=30, schedule=schedule)
    assert rates == pytest.approx([k / 15 for k in range(16)])


# Resuming, seeds, state


@pytest.mark.parametrize("epoch", [1, 3])
@pytest.mark.parametrize("loader", [False, True])
def test_a_killed_run_ends_where_an_uninterrupted_one_does(tmp_path, blobs, epoch, loader):
    """Three minibatches an epoch, each of one pass for the loss and one for the gradients."""
    options = {"epochs": 4, "batch_size": 50, "samples": 2, "checkpoint_seconds": 0}

    def fit(model, **more):
        train = DataLoader(TensorDataset(*blobs[0]), batch_size=50, shuffle=True) if loader else blobs[0]
        return vogn.fit(model, Categorical(), train, **options, **more)

    reference = fit(Fragile(network()))
    path = tmp_path / "run"
    with pytest.raises(Killed):
        fit(Fragile(network(), 12 * epoch + 7), checkpoint=path)
    resumed = fit(Fragile(network()), checkpoint=path)
    epochs: list[Epoch] = []
    again = fit(Fragile(network()), checkpoint=path, progress=epochs.append)
    assert epochs == []
    for other in (resumed, again):
        assert torch.equal(other.draws, reference.draws)
        assert torch.equal(other.gaussian.variance, reference.gaussian.variance)


@pytest.mark.parametrize("change", [{"kl_weight": 0.5}, {"damping": 0.1}, {"momentum": 0.5}, {"curvature_rate": 0.5}])
def test_a_checkpoint_of_other_settings_is_refused(tmp_path, blobs, change):
    options = {"epochs": 2, "checkpoint": tmp_path / "run"}
    vogn.fit(network(), Categorical(), blobs[0], **options)
    with pytest.raises(ValueError, match="another run"):
        vogn.fit(network(), Categorical(), blobs[0], **options, **change)


def test_it_is_seeded_and_leaves_model_and_global_generator_alone(blobs):
    model = network()
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.random.get_rng_state()
    one, two, three = (vogn.fit(model, Categorical(), blobs[0], epochs=2, seed=s) for s in (0, 0, 1))
    assert torch.equal(one.draws, two.draws)
    assert not torch.equal(one.draws, three.draws)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_frozen_parameters_stay(blobs):
    model = network()
    model[0].requires_grad_(False)
    posterior = vogn.fit(model, Categorical(), blobs[0], epochs=2)
    assert posterior.layout.names == ("1.weight", "1.bias", "4.weight", "4.bias")
    assert torch.equal(posterior.network[0].weight, model[0].weight)


def test_bfloat16(blobs):
    posterior = vogn.fit(network(), Categorical(), blobs[0], epochs=4, bf16=True)
    assert posterior.draws.dtype == torch.float32
    assert posterior.draws.isfinite().all()


# Refusals


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kl_weight": 0.0}, "`kl_weight` and `initial_scale` > 0"),
        ({"damping": -1.0}, "`damping` >= 0"),
        ({"damping": math.nan}, "`damping` >= 0"),
        ({"samples": 0}, "`samples` >= 1"),
        ({"momentum": 1.0}, "`momentum` at least 0 and under 1"),
        ({"curvature_rate": 0.0}, "`curvature_rate` over 0"),
        ({"optimizer": torch.optim.SGD}, "leave out `optimizer`"),
    ],
)
def test_refusals(blobs, wrong, message):
    with pytest.raises(ValueError, match=message):
        vogn.fit(network(), Categorical(), blobs[0], **wrong)


def test_plateau_schedules_are_refused(blobs):
    with pytest.raises(TypeError, match="ReduceLROnPlateau"):
        vogn.fit(
            network(), Categorical(), blobs[0], schedule=lambda o, n: torch.optim.lr_scheduler.ReduceLROnPlateau(o)
        )
