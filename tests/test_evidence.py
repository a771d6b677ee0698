"""Scores and p-values: formulas, and validity by simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import nn

import dapcal
from dapcal.calibration.ood_score import Evidence, fit_evidence, pieces_of
from dapcal.distances import FittedSpace, Space, nearest
from dapcal.distances.projectors import Identity
from dapcal.ensembles import base_ensemble
from dapcal.evidence import Piece, leading
from dapcal.likelihoods import Categorical, Gaussian, NoiseHead
from dapcal.posteriors import ensemble

LEVELS = (0.01, 0.05, 0.1, 0.2, 0.5, 0.9)


def conformal(held_out) -> Evidence:
    one = torch.ones(1, dtype=torch.float64)
    return Evidence((), 0 * one, one, torch.as_tensor(held_out, dtype=torch.float64).sort().values)


@pytest.mark.parametrize("n", [1, 7, 100])
@pytest.mark.parametrize("ties", [False, True])
def test_p_value_formula(n, ties):
    rng = np.random.default_rng(n)
    held_out, scores = rng.normal(size=n), rng.normal(size=50)
    if ties:
        held_out, scores = held_out.round(), scores.round()
    expected = [(1 + (held_out >= s).sum()) / (n + 1) for s in scores]
    found = conformal(held_out).p_value(torch.tensor(scores))
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-14)


def test_p_value_at_the_ends():
    evidence = conformal([1.0, 2.0, 2.0, 5.0])
    found = evidence.p_value(torch.tensor([-torch.inf, 1.0, 2.0, 5.0, 5.1, torch.inf]))
    assert found.tolist() == pytest.approx([1.0, 1.0, 0.8, 0.4, 0.2, 0.2])


@pytest.mark.parametrize("n", [20, 100])
@pytest.mark.parametrize("kind", ["continuous", "ties", "exchangeable but dependent"])
def test_p_values_are_valid(n, kind):
    """P(p <= a) <= a, and for continuous scores exactly floor(a (n + 1))/(n + 1)."""
    repetitions = 4000
    rng = np.random.default_rng(n)
    scores = rng.normal(size=(repetitions, n + 1))
    if kind == "ties":
        scores = (2 * scores).round()
    elif kind == "exchangeable but dependent":
        scores = scores * rng.gamma(1.0, size=(repetitions, 1)) + rng.normal(size=(repetitions, 1))
    p = np.array([conformal(s[1:]).p_value(torch.tensor(s[:1])).item() for s in scores])
    for level in LEVELS:
        attained = np.floor(level * (n + 1) + 1e-9) / (n + 1)
        count = (p <= level + 1e-12).sum()
        assert count <= binom.ppf(1 - 1e-6, repetitions, attained)
        if kind != "ties":
            assert count >= binom.ppf(1e-6, repetitions, attained)


def test_p_values_stay_valid_with_scales_from_another_half():
    """The whole path: one half standardises, the other gives p-values, the test input is one more."""
    repetitions, n = 2000, 20
    rng = np.random.default_rng(0)
    count = 0
    for _ in range(repetitions):
        pieces = torch.tensor(rng.gamma(1.0, size=(3, 2 * n + 1)) * [[1.0], [10.0], [0.1]])
        evidence = fit_evidence((), pieces[:, :n], pieces[:, n:-1])
        count += int(evidence.p_value(evidence.score(pieces[:, -1:])) <= 0.05 + 1e-12)
    assert binom.ppf(1e-6, repetitions, 1 / 21) <= count <= binom.ppf(1 - 1e-6, repetitions, 1 / 21)


def test_standardisation_formula():
    rng = np.random.default_rng(0)
    scaling, conformity = rng.normal(size=(3, 51)) * [[1.0], [5.0], [0.2]] + 3, rng.normal(size=(3, 30))
    evidence = fit_evidence((), torch.tensor(scaling), torch.tensor(conformity))
    center = np.median(scaling, axis=1)
    scale = np.quantile(scaling, 0.95, axis=1) - center
    np.testing.assert_allclose(evidence.center.numpy(), center)
    np.testing.assert_allclose(evidence.scale.numpy(), scale)
    expected = np.log(0.5 + 0.5 * np.exp((conformity - center[:, None]) / scale[:, None])).sum(0)
    np.testing.assert_allclose(evidence.score(torch.tensor(conformity)).numpy(), expected)
    np.testing.assert_allclose(evidence.held_out.numpy(), np.sort(expected))


def test_score_does_not_depend_on_the_units_of_distances():
    pieces = torch.rand(3, 41, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    units = torch.tensor([[1.0], [3e5], [1e-4]], dtype=torch.float64)
    one = fit_evidence((), pieces[:, :20], pieces[:, 20:40]).score(pieces[:, 40:])
    two = fit_evidence((), units * pieces[:, :20], units * pieces[:, 20:40]).score(units * pieces[:, 40:])
    torch.testing.assert_close(one, two)


def test_entropies_that_hardly_vary_do_not_swamp_the_distances():
    """A saturated network's entropies: their scale is floored at 0.01 nats, a distance's at 1 % of its median."""
    pieces = torch.tensor([[1e-7], [5.0]]) * (1 + 1e-4 * torch.randn(2, 50, generator=torch.Generator().manual_seed(0)))
    evidence = fit_evidence((), pieces.double(), pieces.double())
    torch.testing.assert_close(evidence.scale, torch.tensor([0.01, 0.05]).double(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("constant", [0.0, 70.0, 0.3])
def test_a_constant_piece_adds_nothing_inside(constant):
    varying = torch.randn(1, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pieces = torch.cat([varying, torch.full_like(varying, constant)])
    evidence = fit_evidence((), pieces[:, :30], pieces[:, 30:])
    alone = fit_evidence((), varying[:, :30], varying[:, 30:])
    torch.testing.assert_close(evidence.score(pieces), alone.score(varying))
    assert (evidence.scale > 0).all()
    far = evidence.score(torch.tensor([[0.0], [1.5 * constant + 1.0]], dtype=torch.float64))
    assert far.isfinite().all()
    assert evidence.p_value(far).item() == pytest.approx(1 / 31)


def test_pieces_of_classification_are_the_entropy_and_the_distances(generator):
    outputs = torch.randn(7, 5, 3, generator=generator)
    raw, further = torch.rand(2, 5, generator=generator), torch.rand(1, 5, generator=generator)
    pieces = pieces_of(Categorical(), base_ensemble(Categorical(), outputs), raw, further)
    entropy = torch.distributions.Categorical(probs=outputs.double().softmax(-1).mean(0)).entropy()
    torch.testing.assert_close(pieces[0], entropy)
    torch.testing.assert_close(pieces[1:], torch.cat([raw, further]).double())


@pytest.mark.parametrize("likelihood", [Gaussian(0.3), NoiseHead()])
def test_pieces_of_regression_are_the_log_epistemic_variance(generator, likelihood):
    outputs = torch.randn(7, 5, 4, generator=generator)
    pieces = pieces_of(likelihood, base_ensemble(likelihood, outputs), torch.zeros(1, 5), torch.empty(0, 5))
    location = outputs if isinstance(likelihood, Gaussian) else outputs[..., :2]
    expected = location.double().numpy().var(0)
    np.testing.assert_allclose(pieces[0].numpy(), np.log(expected).mean(-1), rtol=1e-9)
    assert pieces.shape == (2, 5)


def test_pieces_without_spread_are_finite():
    outputs = torch.ones(3, 4, 1)
    pieces = pieces_of(Gaussian(), base_ensemble(Gaussian(), outputs), torch.zeros(1, 4), torch.empty(0, 4))
    assert pieces.isfinite().all()


# Piece by piece


def space(name: str) -> FittedSpace:
    return FittedSpace(name, Identity(), nearest(torch.zeros(1, 2)), None)


def test_every_piece_has_a_value_and_a_p_value_by_the_formula():
    rng = np.random.default_rng(0)
    scaling, judging, asked = (rng.gamma(1.0, size=(3, n)) * [[1.0], [10.0], [0.1]] for n in (31, 19, 50))
    evidence = fit_evidence((space("unit"),), torch.tensor(scaling), torch.tensor(judging))
    found = evidence.by_name(torch.tensor(asked), (space("inputs"),))
    assert list(found) == ["doubt", "inputs", "unit"]
    for place, piece in enumerate(found.values()):
        center = np.median(scaling[place])
        scale = np.quantile(scaling[place], 0.95) - center
        np.testing.assert_allclose(piece.standardised, (asked[place] - center) / scale)
        p = (1 + (judging[place] >= asked[place][:, None]).sum(1)) / 20
        np.testing.assert_allclose(piece.p_value, p, rtol=1e-14)
        assert piece.p_value.dtype == torch.float64
    total = sum(piece.standardised.exp().add(1).div(2).log() for piece in found.values())
    torch.testing.assert_close(evidence.score(torch.tensor(asked)), total)


def test_p_values_of_pieces_stay_valid_with_scales_from_another_half():
    repetitions, n = 2000, 20
    rng = np.random.default_rng(0)
    counts = dict.fromkeys(("doubt", "inputs"), 0)
    for _ in range(repetitions):
        pieces = torch.tensor(rng.gamma(1.0, size=(2, 2 * n + 1)) * [[1.0], [10.0]])
        evidence = fit_evidence((), pieces[:, :n], pieces[:, n:-1])
        for name, piece in evidence.by_name(pieces[:, -1:], (space("inputs"),)).items():
            counts[name] += int(piece.p_value <= 0.05 + 1e-12)
    for count in counts.values():
        assert binom.ppf(1e-6, repetitions, 1 / 21) <= count <= binom.ppf(1 - 1e-6, repetitions, 1 / 21)


def test_spaces_of_one_name_stay_apart():
    pieces = torch.rand(4, 20, generator=torch.Generator().manual_seed(0))
    evidence = fit_evidence((space("inputs"),), pieces, pieces)
    assert list(evidence.by_name(pieces, (space("inputs"), space("a")))) == ["doubt", "inputs", "a", "inputs 2"]


def test_doubt_alone_where_no_distance_counts():
    doubt = torch.rand(1, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    evidence = fit_evidence((), doubt[:, :20], doubt[:, 20:40])
    (piece,) = evidence.by_name(doubt[:, 40:], ()).values()
    torch.testing.assert_close(piece.p_value, evidence.p_value(evidence.score(doubt[:, 40:])))


def test_the_leading_piece_has_the_smallest_p_value_then_the_largest_standardised_value():
    evidence = {
        "doubt": Piece(torch.tensor([9.0, 1.0, 3.0]), torch.tensor([0.5, 0.1, 0.1]).double()),
        "inputs": Piece(torch.tensor([1.0, 9.0, 2.0]), torch.tensor([0.1, 0.5, 0.1]).double()),
    }
    assert leading(evidence) == ["inputs", "doubt", "doubt"]
    without = {name: Piece(p.standardised, p.p_value * math.nan) for name, p in evidence.items()}
    assert leading(without) == ["doubt", "inputs", "doubt"]


# Reasons

OVERLAP, FAR = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.05, -1.0]]), torch.tensor([[40.0, 0.0], [-30.0, 30.0]])


@pytest.fixture(scope="module")
def overlapping() -> dapcal.Calibrated:
    """Two classes that overlap in few rows, about x = 0."""
    generator = torch.Generator().manual_seed(0)

    def draw(n):
        y = torch.arange(n) % 2
        x = torch.randn(n, 2, generator=generator)
        x[:, 0] += 2.5 * (2 * y - 1)
        return x, y

    train, held_out = draw(300), draw(400)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    posterior = ensemble.fit(make, Categorical(), train, members=3, epochs=20, learning_rate=0.02, seed=0)
    inputs = Space(Identity(), name="inputs")
    return dapcal.calibrate(posterior, train=train, held_out=held_out, distance=inputs, ood=FAR)


def test_flags_of_ambiguous_rows_say_so_and_those_of_far_rows_too(overlapping):
    between = torch.randn(200, 2, generator=torch.Generator().manual_seed(1)) * torch.tensor([0.1, 1.0])
    overlap = overlapping(between)
    near = (overlap.ood_p_value <= 0.05) & (overlap.distance == 0)  # flagged for doubt alone
    assert near.sum() > 20
    assert set(overlap[near].reasons()) == {"ambiguous"}
    prediction = overlapping(FAR)
    assert prediction.reasons() == ["far from the training data (inputs)"] * 2
    ordinary = overlapping(torch.tensor([[2.5, 0.0], [-2.5, 0.3]]))
    assert ordinary.reasons() == ["", ""]
    assert "" not in ordinary.reasons(alpha=1.0)
    assert list(prediction.columns()["reason"]) == prediction.reasons()


def test_evidence_follows_rows_and_batches(overlapping):
    x = torch.cat([OVERLAP, FAR])
    whole = overlapping(x)
    assert list(whole.evidence) == ["doubt", "inputs"]
    joined, picked = overlapping.predict(x, batch_size=2), whole[[4, 1]].cpu()
    for name, piece in whole.evidence.items():
        torch.testing.assert_close(joined.evidence[name].standardised, piece.standardised)
        assert torch.equal(joined.evidence[name].p_value, piece.p_value)
        assert torch.equal(picked.evidence[name].p_value, piece.p_value[[4, 1]])
    assert picked.reasons() == [whole.reasons()[4], whole.reasons()[1]]
    assert whole.base.reasons() == whole.reasons()


def test_evidence_is_kept_in_a_file(overlapping, tmp_path):
    overlapping.save(tmp_path / "a.dap")
    loaded = dapcal.load(tmp_path / "a.dap", overlapping.posterior.network)
    one, two = (each(OVERLAP).evidence["doubt"] for each in (overlapping, loaded))
    assert torch.equal(one.p_value, two.p_value)
    assert not one.p_value.isnan().any()


def test_in_regression_doubt_is_not_ambiguity(overlapping):
    prediction = replace(overlapping(OVERLAP), likelihood=Gaussian())
    assert set(prediction.reasons()) == {"uncertain (the draws disagree)"}
