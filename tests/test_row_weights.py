"""Rows that count more than others in training: how often they are seen, what is learnt, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from typer.testing import CliRunner

from dapcal.cli import app
from dapcal.data import Labelled, order_of
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.models.table_fitting import fit as fit_table
from dapcal.models.table_weights import row_weights
from dapcal.posteriors import ensemble
from dapcal.recipes import Recipe, fit
from dapcal.recipes.boosting import fit_trees
from dapcal.tables.targets import fit_target

QUICK = Recipe(hidden=(8,), epochs=40, members=2, learning_rate=0.02, batch_size=32, fast=True, refit=False)


def test_an_epoch_sees_rows_in_proportion_to_their_weights():
    weights = torch.tensor([0.0, 0.5, 1.0, 2.5, 1.0])
    generator = torch.Generator().manual_seed(0)
    counts = torch.stack([order_of(5, generator, weights).bincount(minlength=5) for _ in range(4000)]).double()
    assert torch.equal(counts.sum(1), torch.full((4000,), 5.0, dtype=torch.float64))
    torch.testing.assert_close(counts.mean(0), weights.double(), atol=0.03, rtol=0)
    assert ((counts - weights).abs() < 1).all(), "rounded up or down"


def test_without_weights_the_order_is_what_it_was():
    one, two = (torch.Generator().manual_seed(3) for _ in range(2))
    assert torch.equal(order_of(9, one), torch.randperm(9, generator=two))


def two_truths(n: int = 600) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every x has a target of 0 or 1; rows with 1 weigh three times as much, so the weighted mean is 3/4."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator)
    y = (torch.arange(n) % 2).float()[:, None]
    return x, y, 1 + 2 * y[:, 0]


@pytest.mark.parametrize("posterior", ["ensemble", "tabm"])
@pytest.mark.parametrize("refit", [False, True])
def test_predictions_are_weighted_means(posterior, refit):
    x, y, weights = two_truths()
    recipe = replace(QUICK, posterior=posterior, refit=refit, epochs=10)
    plain = fit(x, y, Gaussian(), 1, recipe).calibrated(x).mean.mean()
    weighed = fit(x, y, Gaussian(), 1, recipe, weights=weights).calibrated(x).mean.mean()
    assert float(plain) == pytest.approx(0.5, abs=0.1)
    assert float(weighed - plain) == pytest.approx(0.25, abs=0.1)


def test_trees_heed_weights():
    x, y, weights = two_truths()
    trees = fit_trees(Labelled(x, y), Gaussian(), 1, 0, weights=weights)
    assert float(trees(x).mean()) == pytest.approx(0.75, abs=0.02)


def test_rows_of_weight_zero_are_not_learnt():
    x, y, _ = two_truths(200)
    wrong = y + 1000 * (torch.arange(200) % 2).float()[:, None]
    weights = 1.0 - (torch.arange(200) % 2).double()

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))

    def learnt(target: torch.Tensor) -> torch.Tensor:
        rows = [Labelled(x, target)]
        return ensemble.fit_each(make, Gaussian(), rows, None, members=2, epochs=3, row_weights=[weights])[0].draws

    assert torch.equal(learnt(y), learnt(wrong))


def test_equal_weights_change_nothing():
    x, y, _ = two_truths(200)
    first, second = (fit(x, y, Gaussian(), 1, QUICK, weights=w).calibrated for w in (None, torch.full((200,), 7.0)))
    assert torch.equal(first.posterior.draws, second.posterior.draws)


@pytest.mark.parametrize(
    ("weights", "posterior", "words"),
    [
        (torch.ones(3), "ensemble", "as many weights as rows"),
        (-torch.arange(100.0), "ensemble", "numbers >= 0"),
        (torch.zeros(100), "ensemble", "not all 0"),
        (torch.arange(100.0), "laplace", "ensemble, tabm"),
    ],
)
def test_what_rows_cannot_weigh_is_refused(weights, posterior, words):
    x, y, _ = two_truths(100)
    with pytest.raises(ValueError, match=words):
        fit(x, y, Gaussian(), 1, replace(QUICK, posterior=posterior), weights=weights)


# Tables


def table(n: int = 200) -> pa.Table:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=generator).tolist()
    label = ["rare" if i % 10 == 0 else "usual" for i in range(n)]
    return pa.table({"x": x, "w": [1.0 + i % 3 for i in range(n)], "label": label})


def test_balanced_classes_count_as_much_in_all():
    rows = table()
    goal = fit_target(rows["label"])
    y = goal.encode(rows["label"])
    found, notes = row_weights(rows, y, goal, None, "balanced")
    assert float(found[y == 0].sum()) == pytest.approx(float(found[y == 1].sum()))
    assert float(found.mean()) == pytest.approx(1)
    assert "such shares" in notes[0]
    given, _ = row_weights(rows, y, goal, "w", {"rare": 3.0})
    expected = torch.tensor(rows["w"].to_pylist()) * torch.where(y == 0, 3.0, 1.0)
    torch.testing.assert_close(given, (expected / expected.mean()).double())


def test_balanced_classes_are_predicted_more_often():
    recipe = replace(QUICK, epochs=10)
    plain, balanced = (
        fit_table(table(400), "label", recipe=recipe, drop=["w"], class_weights=given) for given in (None, "balanced")
    )
    shares = [float(model.calibrated(model.train.x).probs[:, 0].mean()) for model in (plain, balanced)]
    assert shares[0] == pytest.approx(0.1, abs=0.05)
    assert shares[1] == pytest.approx(0.5, abs=0.1)


def test_the_column_of_weights_is_no_input_and_not_wanted_later():
    model = fit_table(table(), "label", recipe=replace(QUICK, epochs=3), weight="w")
    assert [column.name for column in model.encoder.columns] == ["x"]
    assert any("`w`" in note for note in model.notes)
    assert len(model.predict(table().drop_columns(["w", "label"])).table) == 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--weight", "v"], "v"),
        (["--class-weight", "even"], "balanced"),
        (["--class-weight", "rare=x"], "class=weight"),
        (["--class-weight", "rear=2"], "did you mean 'rare'"),
        (["--class-weight", "rare=0"], "above 0"),
    ],
)
def test_the_command_refuses_what_it_cannot_weigh(options, words, tmp_path):
    import pyarrow.csv

    pyarrow.csv.write_csv(table(), tmp_path / "t.csv")
    given = ["fit", str(tmp_path / "t.csv"), "--target", "label", "-o", str(tmp_path / "m.dap"), "--fast", *options]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert words in result.output + (result.stderr or "")


def test_missing_and_negative_weights_are_named():
    rows = table(40)
    goal = fit_target(rows["label"])
    y = goal.encode(rows["label"])
    wrong = rows.set_column(1, "w", pa.array([1.0, None, 2.0, -1.0] * 10))
    with pytest.raises(ValueError, match="row 2"):
        row_weights(wrong, y, goal, "w", None)
    with pytest.raises(ValueError, match="no classes"):
        row_weights(rows, torch.zeros(40, 1), fit_target(rows["x"]), None, "balanced")


def test_classes_of_a_weighted_table_have_weighted_probabilities():
    x, y, weights = two_truths(400)
    labels = y[:, 0].long()
    found = (
        fit(x, labels, Categorical(), 2, replace(QUICK, epochs=10), weights=weights).calibrated(x).probs[:, 1].mean()
    )
    assert float(found) == pytest.approx(0.75, abs=0.06)
