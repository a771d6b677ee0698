"""Where no distance is informative: predictions are left as they are, and everything else works."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import dapcal
import report_cases
from dapcal import report
from dapcal.adjust import Reweight, Transport
from dapcal.calibration.gap import GapCrossValidation
from dapcal.calibration.reference import choose_reference, outputs_alone
from dapcal.data import Labelled
from dapcal.deploy import export
from dapcal.distances import Distance, Measured, Space
from dapcal.distances.projectors import Features
from dapcal.ensembles import base_ensemble, seen
from dapcal.explain import explain
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors import ensemble, gaussian, laplace
from dapcal.types import DapcalWarning

NONE = Measured((), Distance(()), (), ("distances used: none, no space is informative",))


def network(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs))


@pytest.fixture
def members():
    torch.manual_seed(0)
    return ensemble.of([network() for _ in range(3)], Categorical())


def calibrate(posterior, blobs, **options):
    train, held_out = blobs
    return dapcal.calibrate(posterior, train=train, held_out=held_out, distance=NONE, **options)


@pytest.mark.parametrize("adjust", [None, Reweight(), Transport()])
def test_predictions_are_those_of_the_posterior(blobs, adjust):
    model = network()
    posterior = gaussian.diagonal(
        model, Categorical(), {n: torch.full_like(p, 0.1) for n, p in model.named_parameters()}, prior_scale=1.0
    )
    calibrated = calibrate(posterior, blobs, adjust=adjust)
    far = 100 * blobs[1][0]
    prediction = calibrated(far)
    assert torch.equal(prediction.mean, prediction.base.mean)
    assert not prediction.distance.any()
    assert calibrated.joint(far[:3]).distance.eq(0).all() if adjust is not None else True
    assert calibrated.phi == 0
    assert "nothing to calibrate: no distance counts" in calibrated.notes
    assert repr(calibrated).endswith("distance in: no space)")


def test_the_score_is_doubt_alone(members, blobs):
    calibrated = calibrate(members, blobs)
    prediction = calibrated(torch.cat([blobs[1][0], 9 * blobs[1][0]]))
    doubt = prediction.likelihood.doubt(prediction.base_ensemble)
    standardised = (doubt - calibrated.evidence.center[0]) / calibrated.evidence.scale[0]
    expected = standardised.exp().add(1).div(2).log()
    torch.testing.assert_close(prediction.ood_score, expected.to(prediction.ood_score.dtype))
    assert len(calibrated.evidence.center) == 1


def too_wide(seed: int):
    """A last layer whose σ0 is far too wide for its network, the data of both, and rows to judge by."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(900, 6, generator=generator)
    y = (2 * x[:, :3] + 0.7 * torch.randn(900, 3, generator=generator)).argmax(1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:300]), y[:300]).backward()
        optimizer.step()
    posterior = laplace.last_layer(model.eval(), Categorical(), (x[:300], y[:300]), prior_scale=30.0)
    return posterior, ((x[:300], y[:300]), (x[300:600], y[300:600])), (x[600:], y[600:])


def test_without_a_distance_a_posterior_keeps_the_spread_that_the_guard_allows():
    """Nothing gives back what is taken from it, and its doubt is all of the score."""
    shares = []
    for seed in range(3):
        posterior, data, (x, y) = too_wide(seed)
        calibrated = calibrate(posterior, data)
        chooses = Labelled(data[1][0][calibrated.chooses], data[1][1][calibrated.chooses])
        known, found = (choose_reference(posterior, chooses, whole=whole) for whole in (False, True))
        assert known.share < 1, "the case is one"
        assert known.share <= found.share
        assert torch.equal(calibrated.posterior.draws, found.posterior.draws)
        rises = known.log_prob - found.posterior.likelihood.log_prob(seen(found.posterior, chooses.x), chooses.y)
        assert float(rises.mean() + rises.std() / len(rises) ** 0.5) <= 0.01 or found.share == known.share
        alone = known.network.log_prob(base_ensemble(known.network, outputs_alone(posterior.alone, x)[None]), y)
        assert float((alone - calibrated(x).log_prob(y)).mean()) < 0.02
        shares.append((known.share, found.share))
    assert any(one < other for one, other in shares)


def test_nothing_is_refitted_for_nothing(blobs):
    def refit(x, y):
        raise AssertionError

    model = network(1)
    posterior = gaussian.diagonal(
        model, Gaussian(0.3), {n: torch.full_like(p, 0.1) for n, p in model.named_parameters()}
    )
    (x, _), (other, _) = blobs
    calibrated = dapcal.calibrate(
        posterior,
        train=(x, x[:, :1]),
        held_out=(other, other[:, :1]),
        distance=NONE,
        loss=GapCrossValidation(refit),
    )
    assert not calibrated(other).distance.any()


def test_it_is_stored_deployed_and_explained(members, blobs, tmp_path):
    calibrated = calibrate(members, blobs)
    x = torch.cat([1.01 * blobs[1][0], 9 * blobs[1][0]])  # none of them held out: no ties for rounding to decide
    expected = calibrated(x)
    calibrated.save(tmp_path / "model.dap")
    loaded = dapcal.load(tmp_path / "model.dap", network())
    assert loaded.distance.spaces == ()
    assert torch.equal(loaded(x).mean, expected.mean)
    assert torch.equal(loaded(x).ood_p_value, expected.ood_p_value)

    found = calibrated.module()(x)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.ood_p_value, expected.ood_p_value)
    assert not found.distance.any()
    program = export(calibrated).module()
    torch.testing.assert_close(program(x)["mean"], expected.mean)
    assert not program(x)["distance"].any()

    told = explain(calibrated, blobs[0][0], x[:1])
    assert told.farthest.pre_distance == 0
    assert told.farthest.space == "inputs"
    assert told.spaces == ()


def test_further_evidence_stays_evidence(members, blobs):
    """A distance that nobody chose, beside a space that speaks to the score alone."""
    (train, _), (x, _) = blobs
    further = Space(Features(unit=True), radius=None, name="normalised features").fit(train, x, members)
    calibrated = dapcal.calibrate(
        members, train=blobs[0], held_out=blobs[1], distance=NONE._replace(further=(further,))
    )
    assert len(calibrated.evidence.center) == 2
    torch.testing.assert_close(calibrated.module()(x).ood_score, calibrated(x).ood_score)


def test_calibrate_warns_by_itself(members, blobs, monkeypatch):
    monkeypatch.setattr(dapcal.distances.verdicts, "THRESHOLD", 1.1)
    with pytest.warns(DapcalWarning, match="the OOD score is the model's own doubt alone") as caught:
        calibrated = dapcal.calibrate(members, train=blobs[0], held_out=blobs[1])
    assert [w.filename for w in caught if "doubt alone" in str(w.message)] == [__file__]
    assert calibrated.distance.spaces == ()


def test_it_is_reported(tmp_path):
    subject = report_cases.two_moons()
    train, held_out = ((data.x, data.y) for data in (subject.train, subject.held_out))
    calibrated = dapcal.calibrate(subject.calibrated.posterior, train=train, held_out=held_out, distance=NONE)
    report.write(replace(subject, calibrated=calibrated), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "there was no φ to choose" in page
    assert "nothing: no space is informative" in page
