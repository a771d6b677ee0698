"""Gap cross-validation, from the split to a calibrated posterior."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dapcal
from dapcal.adjust import Inflate
from dapcal.calibration.gap import GapCrossValidation, gap_split
from dapcal.calibration.losses import Problem
from dapcal.data import Labelled
from dapcal.distances import Space
from dapcal.distances.projectors import Identity
from dapcal.likelihoods import Gaussian
from dapcal.posteriors import gaussian, samples
from dapcal.types import DapcalWarning


def ensemble(x: Tensor, y: Tensor, members: int = 12):
    """Straight lines through bootstrap samples: fast, and wrong about a curve's middle."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(x), (members, len(x)), generator=generator)
    design = torch.cat([x, torch.ones_like(x)], 1)
    lines = torch.linalg.lstsq(design[rows], y.reshape(-1, 1)[rows]).solution  # (members, 2, 1)
    stacked = {"weight": lines[:, :1], "bias": lines[:, 1]}
    return samples.from_stacked(nn.Linear(1, 1), Gaussian(0.5), stacked)


@pytest.fixture
def curve(generator):
    def draw(n: int) -> tuple[Tensor, Tensor]:
        x = 4 * torch.rand(n, 1, generator=generator) - 2
        return x, x[:, 0] ** 2 + 0.3 * torch.randn(n, generator=generator)

    return draw(120), draw(80)


@pytest.mark.parametrize(("n", "shape"), [(30, (4,)), (31, (1,)), (32, (2, 3))])
def test_the_gap_is_the_middle_third_along_a_direction(generator, n, shape):
    x = torch.randn(n, *shape, generator=generator)
    gap, rest = gap_split(x, torch.Generator().manual_seed(5))
    assert sorted([*gap.tolist(), *rest.tolist()]) == list(range(n))
    assert len(rest) == 2 * (n // 3)
    direction = torch.randn(
        x.flatten(1).shape[1], generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )  # the one direction that the generator gives
    along = x.flatten(1).double() @ direction
    below, above = rest[: n // 3], rest[n // 3 :]
    assert along[below].max() <= along[gap].min()
    assert along[gap].max() <= along[above].min()


def test_gaps_differ_from_one_to_the_next(generator):
    x = torch.randn(60, 3, generator=generator)
    assert len({tuple(sorted(gap_split(x, generator)[0].tolist())) for _ in range(4)}) == 4


def test_calibrates_without_ood_data(curve):
    train, held_out = curve
    seen = []

    def refit(x: Tensor, y: Tensor):
        seen.append((x, ensemble(x, y)))
        return seen[-1][1]

    loss = GapCrossValidation(refit, regions=3)
    base = ensemble(*train)
    calibrated = dapcal.calibrate(
        base,
        train=train,
        held_out=held_out,
        distance=Space(Identity(), radius=0.5, name="inputs"),
        loss=loss,
        guard=None,
    )
    assert len(seen) == 3
    losses = []
    for kept, posterior in seen:
        # gap and ordinary points are the rows that were not kept
        missing = ~torch.isin(train[0][:, 0], kept[:, 0])
        assert len(kept) == 120 - 40 - 8
        middle = train[0][:, 0].sort().values[40:80]
        assert not torch.isin(kept[:, 0], middle).any()
        outputs = posterior.outputs(train[0][missing]).double()[..., 0]
        predictive = torch.distributions.Normal(outputs.mean(0), (0.25 + outputs.var(0, correction=0)).sqrt())
        losses.append(-predictive.log_prob(train[1][missing].double()))
    assert calibrated.curve.base_loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert calibrated.curve.loss.min() < calibrated.curve.base_loss - 0.05
    far = torch.tensor([[6.0]])
    assert calibrated(far).variance.item() > 2 * calibrated(far).base.variance.item()
    torch.testing.assert_close(calibrated(train[0]).variance, calibrated(train[0]).base.variance)


def test_gaps_are_seeded(curve):
    train, held_out = curve

    def phi(seed: int) -> float:
        loss = GapCrossValidation(ensemble, regions=2, seed=seed)
        space = Space(Identity(), radius=0.5)
        return dapcal.calibrate(
            ensemble(*train), train=train, held_out=held_out, distance=space, loss=loss, guard=None
        ).phi

    assert phi(0) == phi(0)
    assert phi(0) != phi(1)


@pytest.mark.parametrize("guard", [0.01, 0.1])
def test_the_guard_holds_with_gaps(curve, guard):
    train, held_out = curve
    calibrated = dapcal.calibrate(
        ensemble(*train),
        train=train,
        held_out=held_out,
        distance=Space(Identity(), radius=0.5),
        loss=GapCrossValidation(ensemble, regions=2),
        guard=guard,
    )
    at = int((calibrated.curve.phi == calibrated.phi).nonzero())
    assert calibrated.curve.nll[at] <= calibrated.curve.base_nll + guard


def test_in_domain_scaling_reaches_the_refits(curve):
    train, held_out = curve
    noises = []

    def refit(x: Tensor, y: Tensor):
        posterior = ensemble(x, y)
        return replace(posterior, likelihood=Gaussian(50.0))  # noise that no row asks for

    def loss_without_adjustment(temperature: bool) -> float:
        calibrated = dapcal.calibrate(
            ensemble(*train),
            train=train,
            held_out=held_out,
            distance=Space(Identity(), radius=0.5),
            loss=GapCrossValidation(refit, regions=2),
            guard=None,
            temperature=temperature,
        )
        noises.append(calibrated.posterior.likelihood.noise)
        return calibrated.curve.base_loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DapcalWarning)  # noise of 50 leaves nothing to gain
        before, after = loss_without_adjustment(False), loss_without_adjustment(True)
    assert before > 4  # log(50 √2π) = 4.8
    assert after < 2.5
    assert noises[0] == 0.5
    assert noises[1] > 0.8, "the posterior itself is scaled, too: its lines miss a parabola by more than 0.5"


def test_refits_are_as_narrow_as_the_posterior(curve):
    train = Labelled(curve[0][0], curve[0][1].reshape(-1, 1))

    def refit(x: Tensor, y: Tensor):
        line = ensemble(x, y)
        model = nn.Linear(1, 1)
        model.load_state_dict(dict(line.network.state_dict()))
        return gaussian.diagonal(model, Gaussian(0.5), {"weight": torch.ones(1, 1), "bias": torch.ones(1)}, draws=8)

    def losses(refitting, share: float) -> Tensor:
        posterior = refit(*train)
        spaces = (Space(Identity(), radius=0.5),)
        problem = Problem(
            posterior, train.x, None, torch.zeros(1), lambda _: None, train, Inflate(), spaces, None, share
        )
        return GapCrossValidation(refitting, regions=2)(problem)(0.3)

    wide = losses(refit, 1.0)
    narrowed = losses(lambda x, y: refit(x, y).narrowed(0.1), 1.0)
    assert torch.allclose(losses(refit, 0.1), narrowed, rtol=1e-4, atol=0)  # where memory lies decides on last bits
    assert not torch.allclose(losses(refit, 0.1), wide)
