"""What a piece of evidence weighs: formula, limits, who is asked, and where the weights go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

import dapcal
from dapcal.beside import with_evidence
from dapcal.calibration.ood_score import fit_evidence
from dapcal.calibration.weighing import weights_of
from dapcal.data import Labelled
from dapcal.distances import Space
from dapcal.distances.outliers import near, synthetic
from dapcal.distances.projectors import Identity
from dapcal.likelihoods import Categorical
from dapcal.posteriors import ensemble
from dapcal.posteriors.predictions import StackedPredictions


def drawn(shifts: list[float], n: int = 40, seed: int = 0) -> torch.Tensor:
    """Pieces (M, n), each shifted by so much."""
    noise = torch.randn(len(shifts), n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise + torch.tensor(shifts, dtype=torch.float64)[:, None]


def brute_force(inside: torch.Tensor, outside: list[torch.Tensor]) -> np.ndarray:
    """The quadratic programme of the linear discriminant, by a general solver; the first piece, doubt, has at least ½.

    Its linear part are the differences of means, its quadratic part the covariances, shrunk: λ = 4 and 0.001.
    """
    own, *kinds = (
        np.minimum(np.log(0.5 + 0.5 * np.exp(z)), 10) for z in (inside.numpy(), *[kind.numpy() for kind in outside])
    )
    m = np.mean([kind.mean(1) for kind in kinds], 0) - own.mean(1)
    spread = np.cov(own, bias=True) + np.mean([np.cov(kind, bias=True) for kind in kinds], 0)
    spread = spread + np.diag(4 * np.diag(spread) + 1e-3)
    found = minimize(
        lambda w: w @ spread @ w / 2 - m @ w, np.ones(len(m)), jac=lambda w: spread @ w - m, method="L-BFGS-B",
        bounds=[(0, None)] * len(m), options={"ftol": 1e-15, "gtol": 1e-12},
    )  # fmt: skip
    weights = found.x / found.x.max()
    return np.array([max(weights[0], 0.5), *weights[1:]])


def test_formula():
    inside, outside = (
        drawn([0, 0, 0, 0]).round(decimals=1),
        [drawn([1, 0.5, 2, 0.2], seed=1), drawn([2, 1, 0, 1], 30, 2)],
    )
    outside = [kind.round(decimals=1) for kind in outside]  # ties
    np.testing.assert_allclose(weights_of(inside, outside).numpy(), brute_force(inside, outside), atol=1e-6)


def test_equal_pieces_weigh_the_same_and_make_the_plain_sum():
    inside, outside = drawn([0]).expand(3, -1), drawn([1], seed=1).expand(3, -1)
    weights = weights_of(inside, [outside])
    assert weights.tolist() == pytest.approx([1, 1, 1])
    plain, weighed = fit_evidence((), inside, inside), fit_evidence((), inside, inside, weights)
    torch.testing.assert_close(plain.score(outside), weighed.score(outside))


def test_a_piece_that_tells_nothing_or_the_opposite_weighs_next_to_nothing():
    weights = weights_of(drawn([0, 0, 0], 2000), [drawn([1, 0, -2], 2000, 1)])
    assert weights[0] == 1
    assert weights[1] < 0.1
    assert weights[2] == 0


def test_pieces_that_say_the_same_share_their_weight():
    inside, outside = drawn([0, 0], 2000), drawn([1, 1], 2000, 1)
    alone, several = (weights_of(inside[rows], [outside[rows]]) for rows in ([0, 1], [0, *[1] * 8]))
    assert several[1:].tolist() == pytest.approx([float(several[1])] * 8)
    assert several[1] < 0.6 * alone[1]
    assert 8 * several[1] > alone[1]


def test_what_is_far_in_one_space_is_not_made_up_for_by_another():
    evidence = fit_evidence((), drawn([0, 0]), drawn([0, 0], seed=1))
    far = torch.tensor([[8.0, 8.0], [0.0, -1000.0]], dtype=torch.float64)
    score = evidence.score(far)
    assert float(score[1]) > float(score[0]) - 1
    old = replace(evidence, soft=False)  # as files of earlier versions have it
    assert float(old.score(far)[1]) < float(old.score(far)[0]) - 100


def test_no_outlier_and_no_number_is_too_large():
    inside, outside = drawn([0, 0]), drawn([1, 2], seed=1)
    outside[1, 0] = torch.inf
    weights = weights_of(inside, [outside])
    assert weights.isfinite().all()
    assert weights[1] > 0


def test_doubt_keeps_half_of_the_largest_weight():
    """Outliers that are made up do not ask for the ambiguous."""
    assert weights_of(drawn([0, 0]), [drawn([-1, 3], seed=1)]).tolist() == [0.5, 1]


def test_where_no_piece_tells_anything_all_weigh_the_same():
    assert weights_of(drawn([0, 0]), [drawn([-1, -2], seed=1)]).tolist() == [1, 1]
    assert weights_of(drawn([0, 0]), []).tolist() == [1, 1]


def test_the_order_of_pieces_kinds_and_rows_does_not_matter():
    inside, outside = drawn([0, 0, 0]), [drawn([1, 0.5, 2], seed=1), drawn([2, 1, 0], seed=2)]
    order, rows = [0, 2, 1], torch.randperm(40, generator=torch.Generator().manual_seed(3))
    expected = weights_of(inside, outside)
    torch.testing.assert_close(weights_of(inside[order], [k[order] for k in outside]), expected[order])
    torch.testing.assert_close(weights_of(inside[:, rows], outside[::-1]), expected)


def test_the_score_is_the_weighed_sum():
    scaling, judging, asked = drawn([0, 1, 2]), drawn([0, 1, 2], 30, 1), drawn([3, 3, 3], 20, 2)
    weights = torch.tensor([1.0, 0.25, 0.0], dtype=torch.float64)
    evidence = fit_evidence((), scaling, judging, weights)

    def expected(pieces):
        return weights @ evidence.standardised(pieces).exp().add(1).div(2).log()

    torch.testing.assert_close(evidence.score(asked), expected(asked))
    torch.testing.assert_close(evidence.held_out, expected(judging).sort().values)
    useless = asked.clone()
    useless[2] = 1e9
    torch.testing.assert_close(evidence.score(useless), evidence.score(asked))


# Outliers that are asked


def test_images_are_cut_turned_and_mixed():
    x = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = near(x, x)
    assert list(found) == ["halves", "turned", "mixed"]
    torch.testing.assert_close(found["halves"][0], torch.cat([x[0, :, :, :4], x[5, :, :, 4:]], 2))
    torch.testing.assert_close(found["turned"][:, :, 0, 0], x[:, :, 0, 7])
    torch.testing.assert_close(found["mixed"], synthetic(x, x)["mixed"])


def test_long_images_are_turned_upside_down():
    x = torch.rand(6, 1, 8, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(near(x, x)["turned"], x.flip(2).flip(3))


@pytest.mark.parametrize("along", [1, 2])
def test_sequences_are_joined_swapped_and_mixed_along_time(along):
    x = torch.rand(6, 2, 9, generator=torch.Generator().manual_seed(0)).transpose(2, along)
    found = {kind: rows.transpose(2, along) for kind, rows in near(x, x).items()}
    x = x.transpose(2, along)
    assert list(found) == ["halves", "swapped", "mixed"]
    torch.testing.assert_close(found["halves"][0], torch.cat([x[0, :, :4], x[5, :, 4:]], 1))
    torch.testing.assert_close(found["swapped"], torch.cat([x[..., 4:], x[..., :4]], 2))
    torch.testing.assert_close(found["mixed"], (x + x.flip(0)) / 2)


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 2), (6, 2, 5, 3)])
def test_what_is_neither_sequence_nor_image_is_shuffled(shape):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    assert list(near(x, x)) == ["noise", "shuffled"]


def test_whole_numbers_are_no_sequence():
    """Half of one text before half of another would do, and tells the same as words exchanged."""
    x = torch.arange(24).reshape(4, 6)
    assert list(near(x, x)) == ["shuffled"]


def test_other_inputs_have_the_outliers_that_spaces_are_judged_by():
    x = torch.rand(20, 3, generator=torch.Generator().manual_seed(0))
    found, expected = near(x, x), synthetic(x, x)
    assert list(found) == ["noise", "shuffled"]
    for kind, rows in found.items():
        assert torch.equal(rows, expected[kind])


# The whole way


@pytest.fixture(scope="module")
def blobs():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(300) % 2
    x = torch.randn(300, 2, generator=generator) + 1.0 * y[:, None]
    return (x[:200], y[:200]), (x[200:], y[200:])


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture(scope="module")
def members(blobs):
    return ensemble.fit(make, Categorical(), blobs[0], members=2, epochs=5, batch_size=64, learning_rate=1e-2)


@pytest.fixture(scope="module")
def calibrated(members, blobs):
    return dapcal.calibrate(members, train=blobs[0], held_out=blobs[1], candidates=8)


def test_calibrate_asks_the_half_that_chooses(calibrated, blobs):
    def pieces(x):
        return torch.stack([piece.standardised for piece in calibrated(x).evidence.values()])

    inside = blobs[1][0][calibrated.chooses]
    outside = [pieces(kind) for kind in near(blobs[0][0], inside).values()]
    np.testing.assert_allclose(calibrated.evidence.weights, brute_force(pieces(inside), outside), atol=2e-5)
    assert len(set(calibrated.evidence.weights.tolist())) > 1
    (told,) = [note for note in calibrated.notes if note.startswith("weights in the OOD score")]
    for name, weight in zip(calibrated(inside).evidence, calibrated.evidence.weights, strict=True):
        assert f"{name} {weight:.2f}" in told
    assert "noise and shuffled" in told


def test_rows_that_judge_have_no_say(members, blobs, calibrated):
    x = blobs[1][0].clone()
    x[calibrated.judges] += 5.0
    other = dapcal.calibrate(members, train=blobs[0], held_out=(x, blobs[1][1]), candidates=8)
    torch.testing.assert_close(other.evidence.weights, calibrated.evidence.weights)
    assert not torch.equal(other.evidence.held_out, calibrated.evidence.held_out)


def test_weights_are_stored_moved_and_deployed(calibrated, blobs, tmp_path):
    x = blobs[1][0]
    expected = calibrated(x).ood_score
    calibrated.save(tmp_path / "a.dap")
    loaded = dapcal.load(tmp_path / "a.dap", make())
    assert torch.equal(loaded.evidence.weights, calibrated.evidence.weights)
    torch.testing.assert_close(loaded(x).ood_score, expected)
    torch.testing.assert_close(calibrated.to("cpu").module()(x).ood_score, expected)
    # the plain sum is another score, as the module knows
    plain = replace(calibrated, evidence=replace(calibrated.evidence, weights=None))
    assert not torch.allclose(plain(x).ood_score, expected)
    torch.testing.assert_close(plain.module()(x).ood_score, plain(x).ood_score)


def test_what_stands_beside_stands_beside_the_weighed_sum(calibrated, blobs):
    space = Space(Identity(), radius=None, name="again")
    more = with_evidence(calibrated, Labelled(*blobs[0]), Labelled(*blobs[1]), (space,))
    x = blobs[1][0]
    assert torch.equal(more.evidence.weights, calibrated.evidence.weights)
    total = (calibrated(x).ood_score - more.evidence.sum_center) / more.evidence.sum_scale
    again = more(x).evidence["again"].standardised
    expected = (10**total + 3 * 10**again).log10()
    torch.testing.assert_close(more(x).ood_score, expected.to(total.dtype), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(more.module()(x).ood_score, more(x).ood_score)


def test_predictions_of_a_function_are_not_asked_for_at_made_up_inputs(members, blobs):
    known = torch.cat([blobs[0][0], blobs[1][0]])

    def function(x):
        assert (x[:, None] == known).all(2).any(1).all()
        return members.outputs(x)

    calibrated = dapcal.calibrate(
        StackedPredictions(function, Categorical()), train=blobs[0], held_out=blobs[1], candidates=8
    )
    assert calibrated.evidence.weights is None


def test_doubt_alone_has_nothing_to_be_weighed_against(members, blobs, monkeypatch):
    monkeypatch.setattr(dapcal.distances.verdicts, "THRESHOLD", 1.1)
    with pytest.warns(dapcal.DapcalWarning, match="doubt alone"):
        calibrated = dapcal.calibrate(members, train=blobs[0], held_out=blobs[1])
    assert calibrated.evidence.weights is None
