"""What users keep: predictions batch by batch, on another device, copied; which held-out rows chose and which judge."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dapcal
from dapcal.adjust import Reweight
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.moving import moved
from dapcal.posteriors import ensemble, gaussian

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")  # of loose guards and collapsed weights


@pytest.fixture
def calibrated(posterior, blobs):
    found = dapcal.calibrate(posterior, train=blobs[0], held_out=blobs[1], seed=3)
    return replace(found, phi=0.0)  # a distance that leaves probabilities their digits


@pytest.fixture
def regression():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 2, generator=generator)
    y = x.sum(1, keepdim=True)
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    scale = {name: torch.full_like(p, 0.1) for name, p in network.named_parameters()}
    posterior = gaussian.diagonal(network, Gaussian(0.3), scale, draws=10)
    return dapcal.calibrate(posterior, train=(x[:80], y[:80]), held_out=(x[80:], y[80:])), x


def same(one: dapcal.Prediction, two: dapcal.Prediction) -> bool:
    names = ("mean", "variance", "epistemic", "entropy", "distance", "ood_score", "ood_p_value")
    return all(torch.allclose(getattr(one, n), getattr(two, n), rtol=1e-5, atol=2e-6) for n in names)


class Inputs(Dataset):
    """Inputs without targets."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.x[row]


@pytest.mark.parametrize(
    "given",
    [
        lambda x, y: x,
        lambda x, y: (x, y),
        lambda x, y: TensorDataset(x, y),
        lambda x, y: Inputs(x),
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=50),
    ],
    ids=["inputs", "pair", "data set", "inputs alone", "loader"],
)
def test_any_number_of_inputs_a_batch_at_a_time(calibrated, blobs, given):
    x, y = blobs[1][0] + 0.1, blobs[1][1]  # a held-out score itself would be a tie
    whole, state = calibrated(x), torch.random.get_rng_state()
    found = calibrated.predict(given(x, y), batch_size=7)
    assert len(found) == len(x)
    assert same(found, whole)
    assert torch.equal(state, torch.random.get_rng_state())


def test_importance_weights_are_joined_too(posterior, blobs):
    weighted = dapcal.calibrate(posterior, train=blobs[0], held_out=blobs[1], adjust=Reweight(), guard=None)
    whole, found = weighted(blobs[1][0]), weighted.predict(blobs[1][0], 11)
    assert torch.allclose(found.diagnostics.ess, whole.diagnostics.ess)


def test_wrong_data_are_refused(calibrated):
    with pytest.raises(TypeError, match="Expected `data` as inputs"):
        calibrated.predict({"x": 1})
    with pytest.raises(ValueError, match="Expected `batch_size` >= 1, got 0"):
        calibrated.predict(torch.zeros(3, 2), 0)


def test_copies_and_other_devices_predict_the_same(calibrated, blobs):
    x = blobs[1][0] + 0.1
    for other in (copy.deepcopy(calibrated), calibrated.to("cpu")):
        assert same(other(x), calibrated(x))
        assert all(space.projector.network is other.posterior.network for space in other.evidence.further)


@dataclass(frozen=True)
class Nested:
    """Everything that a fitted object is made of."""

    tensor: torch.Tensor
    inner: tuple[dict[str, torch.Tensor], nn.Module]
    same: torch.Tensor
    name: str = "nested"


def test_everything_moves():
    """The device meta stands for another one."""
    tensor = torch.zeros(2)
    found = moved(Nested(tensor, ({"a": torch.ones(1)}, nn.Linear(1, 1)), tensor), torch.device("meta"))
    assert found.tensor is found.same
    assert found.tensor.is_meta
    assert found.inner[0]["a"].is_meta
    assert found.inner[1].weight.is_meta
    assert found.name == "nested"
    assert not tensor.is_meta


def test_an_ensemble_moves_with_its_members(blobs):
    members = ensemble.fit(
        lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)),
        Categorical(),
        blobs[0],
        members=2,
        epochs=1,
    )
    calibrated = dapcal.calibrate(members, train=blobs[0], held_out=blobs[1])
    assert same(calibrated.to("cpu")(blobs[1][0]), calibrated(blobs[1][0]))


def test_it_knows_which_held_out_rows_chose_and_which_judge(calibrated, blobs, tmp_path):
    n = len(blobs[1][0])
    assert sorted([*calibrated.chooses.tolist(), *calibrated.judges.tolist()]) == list(range(n))
    scores = calibrated(blobs[1][0][calibrated.judges]).ood_score.double()
    assert torch.allclose(scores.sort().values, calibrated.evidence.held_out.double(), atol=1e-5)
    calibrated.save(tmp_path / "m.dap")
    again = dapcal.load(tmp_path / "m.dap", calibrated.posterior.model)
    assert torch.equal(again.chooses, calibrated.chooses)
    assert torch.equal(again.judges, calibrated.judges)


# Prediction


@pytest.mark.parametrize(
    "rows", [3, -1, slice(2, 9), [4, 1], torch.tensor([5, 5, 0]), torch.arange(12) % 2 == 0], ids=str
)
def test_some_of_the_inputs(calibrated, blobs, rows):
    x = blobs[1][0][:12]
    whole = calibrated(x)
    picked = torch.arange(12)[[rows] if isinstance(rows, int) else rows]
    part = whole[rows]
    assert len(part) == len(picked)
    assert torch.equal(part.probs, whole.probs[picked])
    assert torch.equal(part.ood_p_value, whole.ood_p_value[picked])
    assert torch.equal(part.base.probs, whole.base.probs[picked])


def test_a_row_that_is_not_there(calibrated):
    with pytest.raises(IndexError, match="Expected a row between 0 and 3, got 4"):
        calibrated(torch.zeros(4, 2))[4]


def test_p_values_are_exact_shares(calibrated, blobs):
    prediction = calibrated(blobs[1][0])
    shares = prediction.ood_p_value * (len(calibrated.judges) + 1)
    assert prediction.ood_p_value.dtype == torch.float64
    assert torch.allclose(shares, shares.round(), atol=1e-12, rtol=0)


def test_columns_of_classes(calibrated, blobs):
    prediction = calibrated(blobs[1][0])
    columns = prediction.columns(alpha=0.5)
    names = ["prediction", "probability", "epistemic", "aleatoric", "distance", "ood_score", "ood_p_value", "ood"]
    assert list(columns) == [*names, "reason"]
    assert (columns["prediction"] == prediction.probs.argmax(-1).numpy()).all()
    np.testing.assert_allclose(columns["probability"].sum(1), 1, rtol=1e-5)
    assert (columns["ood"] == (prediction.ood_p_value.numpy() <= 0.5)).all()
    assert columns["ood_p_value"].dtype == np.float64


def test_columns_of_targets(regression):
    calibrated, x = regression
    prediction = calibrated(x)
    columns = prediction.columns(level=0.5)
    lower, upper = prediction.interval(0.5)
    np.testing.assert_allclose(columns["lower"], lower.numpy())
    np.testing.assert_allclose(columns["upper"], upper.numpy())
    np.testing.assert_allclose(columns["epistemic"], prediction.epistemic.sqrt().numpy(), rtol=1e-5)
    with pytest.raises(ValueError, match="Expected `level` between 0 and 1, got 1"):
        prediction.columns(level=1)


def test_one_line_says_what_it_is(calibrated, posterior):
    prediction = calibrated(torch.zeros(4, 2))
    assert repr(prediction).startswith("Prediction(4 inputs, Categorical, ")
    for thing in (prediction, calibrated, posterior):
        assert "\n" not in repr(thing)
        assert len(repr(thing)) < 200
