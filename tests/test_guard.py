"""What the guard counts: against brute force, by hand, and on networks with few held-out rows."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.datasets import load_iris
from torch import Tensor, nn

import dapcal
from dapcal.adjust import Inflate
from dapcal.calibration.guard import FOLDS, Rows, crossed
from dapcal.distances import Space, fit_distance
from dapcal.distances.projectors import Identity
from dapcal.distances.radius import fit_radius
from dapcal.distances.spaces import Distance
from dapcal.ensembles import base_ensemble
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, MultiLabel, PerPlace
from dapcal.posteriors import samples

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.types.DapcalWarning")


def classes(number: int = 6, inputs: int = 40):
    """Draws of a linear network, and inputs."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(number, 3, 2, generator=generator), torch.randn(number, 3, generator=generator)
    posterior = samples.from_stacked(nn.Linear(2, 3), Categorical(), {"weight": weight, "bias": bias})
    return posterior, torch.randn(inputs, 2, generator=generator)


# Every row by the radius of others


@pytest.mark.parametrize("radius", [0.9, 0.5, None])
def test_each_row_is_measured_by_the_radius_of_others(radius):
    posterior, x = classes()
    spaces = (Space(Identity(), radius=radius), Space(lambda z: z[:, :1], radius=0.8))
    train = torch.randn(100, 2, generator=torch.Generator().manual_seed(1))
    distance = fit_distance(spaces, train, x, posterior)
    raw = distance.raw(x)
    found = crossed(spaces, distance, raw)
    for row in range(len(x)):
        others = torch.tensor([place % FOLDS != row % FOLDS for place in range(len(x))])
        own = [
            raw[n, row] if space.radius is None else fit_radius(raw[n][others], space.radius, "")(raw[n, row])
            for n, space in enumerate(spaces)
        ]
        assert float(found[row]) == pytest.approx(float(max(own)), rel=1e-5, abs=1e-6)


def test_more_rows_lie_outside_the_radius_of_others_than_outside_their_own():
    """As new ones do: one of eleven rows lies beyond their 90 % quantile by construction, two of twelve in fact."""
    own, others, new = 0.0, 0.0, 0.0
    space, posterior = Space(Identity(), radius=0.9), classes()[0]
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        train, held_out, asked = (torch.randn(n, 2, generator=generator) for n in (60, 11, 200))
        distance = fit_distance((space,), train, held_out, posterior)
        raw = distance.raw(held_out)
        own += float((distance.combine(raw) > 0).double().mean()) / 60
        others += float((crossed((space,), distance, raw) > 0).double().mean()) / 60
        new += float((distance(asked) > 0).double().mean()) / 60
    assert own < others - 0.05
    assert abs(others - new) < 0.05


def test_without_a_radius_of_others_that_of_all_rows_counts():
    posterior, x = classes()
    held_out = torch.cat([x, torch.full((1, 2), 50.0)])  # all others have a twin in training
    distance = fit_distance(Space(Identity()), x, held_out, posterior)
    found = crossed((Space(Identity()),), distance, distance.raw(held_out))
    assert found.isfinite().all()
    assert not found[:-1].any()
    assert not crossed((), Distance(()), torch.empty(0, 4)).any()


# One row more


def counted(posterior, x: Tensor, y: Tensor, d0: Tensor) -> Rows:
    return Rows(
        posterior.likelihood,
        base_ensemble(posterior.likelihood, posterior.outputs(x)),
        y,
        Inflate()(posterior, x),
        d0,
        d0,
    )


def test_one_row_more_pays_the_most_of_all_outside():
    posterior, x = classes()
    base = base_ensemble(Categorical(), posterior.outputs(x))
    y = Categorical().mean(base).argmax(1)
    d0 = torch.zeros(len(x))
    d0[3:9] = torch.linspace(0.5, 2, 6)
    nll, more = counted(posterior, x, y, d0).at(3.0)
    log_prob = Categorical().log_prob(Inflate()(posterior, x)(3 * d0), y)
    rises = Categorical().log_prob(base, y) - log_prob
    assert (rises[3:9] > 0).all()
    with_one = torch.cat([rises, rises.max()[None]])
    assert nll == pytest.approx(float(-log_prob.mean()))
    bound = float(with_one.mean()) + float(with_one.std()) / math.sqrt(len(with_one))
    assert nll + more == pytest.approx(float(-Categorical().log_prob(base, y).mean()) + bound)


def test_where_all_rows_outside_gain_one_more_pays_what_the_posterior_expects():
    posterior, x = classes()
    base = base_ensemble(Categorical(), posterior.outputs(x))
    y = Categorical().mean(base).argmin(1)  # wrong, so that widening does good to all of them
    d0 = torch.zeros(len(x))
    d0[:2] = 1.0
    rows, after = counted(posterior, x, y, d0), Inflate()(posterior, x)(5 * d0)
    nll, more = rows.at(5.0)
    rises = Categorical().log_prob(base, y) - Categorical().log_prob(after, y)
    assert (rises[:2] < 0).all()
    pays = Categorical().expected_rise(base, after)[:2].max()
    with_one = torch.cat([rises, pays[None]])
    bound = float(with_one.mean()) + float(with_one.std()) / math.sqrt(len(with_one))
    assert nll + more == pytest.approx(rows.at(0.0)[0] + bound)


def test_without_distance_nothing_is_counted():
    posterior, x = classes()
    rows = counted(posterior, x, torch.zeros(len(x), dtype=torch.long), torch.ones(len(x)))
    nll, more = rows.at(0.0)
    assert more == pytest.approx(0, abs=1e-9)
    assert math.isfinite(nll)


def test_numbers_expect_no_rise():
    base = base_ensemble(Gaussian(1.0), torch.randn(4, 5, 1))
    assert not Gaussian(1.0).expected_rise(base, base).any()


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        (Categorical(), 4),
        (Categorical(2.0), 3),
        (Bernoulli(), 1),
        (MultiLabel(), 3),
        (PerPlace(Categorical(), (2, 2)), 12),
    ],
    ids=str,
)
def test_the_expected_rise_is_the_mean_over_targets_that_the_base_posterior_draws(likelihood, outputs):
    generator = torch.Generator().manual_seed(3)
    base = base_ensemble(likelihood, 2 * torch.randn(5, 4, outputs, generator=generator))
    other = base._replace(spread=base.spread + 5.0)
    y = likelihood.sample(base, 4000, generator)
    rises = torch.stack([likelihood.log_prob(base, one) - likelihood.log_prob(other, one) for one in y])
    error = rises.std(0) / math.sqrt(len(rises))
    expected = likelihood.expected_rise(base, other)
    assert expected.shape == (4,)
    assert ((rises.mean(0) - expected).abs() < 4 * error + 1e-6).all()
    assert (expected > 0).all()


# Networks


def rise_on_iris(seed: int) -> float:
    """Nats by which four networks of 15 rows that choose lose on new rows, through φ."""
    x, y = load_iris(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(x, dtype=torch.float32)[order], torch.tensor(y)[order]
    x = (x - x[:60].mean(0)) / x[:60].std(0)
    networks = [trained(x[:60], y[:60], 10 * seed + member) for member in range(4)]
    posterior = samples.from_state_dicts(networks[0], Categorical(), [one.state_dict() for one in networks])
    calibrated = dapcal.calibrate(posterior, train=(x[:60], y[:60]), held_out=(x[60:90], y[60:90]), seed=seed)
    prediction = calibrated(x[90:])
    return float((prediction.base.log_prob(y[90:]) - prediction.log_prob(y[90:])).mean())


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network.eval()


def test_few_held_out_rows_do_not_set_phi_free():
    """Fifteen rows choose. New rows paid 0.067 nats where the radius was that of the same rows."""
    rises = [rise_on_iris(seed) for seed in range(6)]
    assert sum(rises) / len(rises) < 0.04
