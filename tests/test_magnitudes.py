"""Numbers over orders of magnitude count by their logarithm, too: encoded, kept, flagged, predicted, and drawn."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from dapcal.distances.column_checks import fit_checks
from dapcal.metrics import auroc
from dapcal.models.table_fitting import fit
from dapcal.recipes import Recipe
from dapcal.report.examples import gather
from dapcal.report.questions import column_effects
from dapcal.tables.column_space import column_space, parts_of
from dapcal.tables.descriptions import encoder_from_json
from dapcal.tables.encoder import fit_encoder
from dapcal.tables.magnitudes import Magnitude, fit_magnitude
from dapcal.tables.rows import RowEncoder

RECIPE = Recipe(fast=True, members=3)


def towns(n: int = 400, seed: int = 0) -> pa.Table:
    """Populations over five orders of magnitude, and a target that goes with their logarithm."""
    random = np.random.default_rng(seed)
    people = np.exp(random.normal(9, 2, n)).round()
    homes = (people / random.uniform(2, 3, n)).round()
    visits = np.where(random.random(n) < 0.5, 0.0, np.exp(random.normal(4, 2, n)).round())
    age = random.normal(40, 5, n)
    score = np.log(people) + 0.5 * np.log1p(visits) + 0.1 * age + random.normal(0, 0.3, n)
    return pa.table({"people": people, "homes": homes, "visits": visits, "age": age, "score": score})


@pytest.fixture(scope="module")
def model():
    return fit(towns(), "score", recipe=RECIPE)


def test_a_magnitude_is_a_line_at_zero_and_a_logarithm_far_from_it():
    found = Magnitude(unit=2.0, center=1.0, scale=0.5)
    values = np.array([-8.0, 0.0, 1e-6, 1e6, np.nan])
    expected = (np.array([-np.log(5), 0.0, 5e-7, np.log(5e5 + 1), np.nan]) - 1) / 0.5
    np.testing.assert_allclose(found(values), expected, rtol=1e-12)
    assert (np.diff(found(np.sort(np.random.default_rng(0).standard_cauchy(100)))) > 0).all()


@pytest.mark.parametrize("is_heavy", [True, False])
def test_heavy_tails_have_one_and_others_have_none(is_heavy):
    random = np.random.default_rng(1)
    heavy = [np.exp(random.normal(0, 2, 300)), random.standard_cauchy(300), 10.0 ** random.integers(0, 6, 300)]
    light = [
        random.normal(0, 1, 300), random.uniform(0, 100, 300), random.exponential(1, 300), 1e6 + heavy[0],
        np.where(random.random(300) < 0.95, 0, heavy[0]), random.choice([1.0, 1000.0], 300, p=[0.9, 0.1]),
        heavy[0][:20],
    ]  # fmt: skip
    for values in heavy if is_heavy else light:
        found = fit_magnitude(values)
        assert (found is not None) == is_heavy
        if found is not None:
            assert found(values).mean() == pytest.approx(0, abs=1e-9)
            assert found(values).std() == pytest.approx(1)


def test_it_stands_beside_the_number_and_rows_of_a_service_have_the_same():
    table = towns()
    encoder = fit_encoder(table, "score")
    assert encoder.names == ("people",) * 3 + ("homes",) * 3 + ("visits",) * 3 + ("age",) * 2
    x = encoder(table).x
    np.testing.assert_allclose(x[:, [0, 2]].mean(0), 0, atol=1e-5)
    assert float(x[:, 2].max()) < 4 < float(x[:, 0].max())
    assert any("`people` goes over orders of magnitude" in note for note in encoder.notes)
    rows = [{"people": 1e7, "homes": None, "visits": 0.0, "age": 3.0}, dict.fromkeys(encoder.expected)]
    by_table = encoder(pa.table({name: pa.array([row[name] for row in rows], pa.float64()) for name in rows[0]}))
    assert torch.equal(RowEncoder(encoder)(rows), by_table.x)
    assert by_table.x[1].tolist() == [0, 1, 0] * 3 + [0, 1], "what is missing counts as the mean"
    assert encoder.decode(by_table.x)[1]["people"] == "missing"


def test_it_is_learnt_from_the_training_rows_alone():
    table = towns()
    people = table["people"].to_numpy().copy()
    people[200:] = 5.0
    changed = table.set_column(0, "people", pa.array(people))
    places = np.arange(200)
    one, two = (fit_encoder(rows, "score", places=places).columns[0] for rows in (table, changed))
    assert one.magnitude is not None
    assert one.magnitude == two.magnitude


def test_files_keep_it_exactly_and_refuse_a_damaged_one():
    encoder = fit_encoder(towns(), "score")
    told = json.loads(json.dumps(encoder.as_json()))
    assert encoder_from_json(told) == encoder
    good = told["columns"][0]["magnitude"]
    for bad in ({}, [], {**good, "unit": "0x0p+0"}, {**good, "more": 1}):
        told["columns"][0]["magnitude"] = bad
        with pytest.raises(ValueError, match="`people` has no magnitude"):
            encoder_from_json(told)


def test_predictions_see_proportions(model):
    """Where inputs were standardised alone it was off by 1.1; the noise is 0.3."""
    new = towns(2000, seed=1)
    predicted = model.predict(new).table["prediction"].to_numpy()
    assert np.sqrt(np.mean((predicted - new["score"].to_numpy()) ** 2)) < 0.7


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_wrong_units_are_flagged(model, factor):
    new = towns(300, seed=2)
    wrong = new.set_column(0, "people", pa.array((new["people"].to_numpy() * factor).round()))
    ordinary, strange = (model.predict(rows).table["ood_p_value"].to_numpy() for rows in (new, wrong))
    assert (ordinary <= 0.05).mean() < 0.15
    assert auroc(torch.from_numpy(-strange), torch.from_numpy(-ordinary)) > 0.9


def test_no_number_is_compared_with_its_own_magnitude():
    encoder = fit_encoder(towns(), "score")
    space = column_space(encoder)
    assert space.metric.copies == (2, 5, 8)
    x = encoder(towns()).x
    found = fit_checks(x, parts_of(encoder), space.metric.copies)
    assert not set(found.likeness.others.tolist()) & {2, 5, 8}


def test_effects_are_drawn_with_both(model):
    """What is drawn at a value is what is predicted where the column has it."""
    examples = gather(model.subject("towns.dap"))
    effect = next(one for one in column_effects.measure(examples).effects if one.column == "people")
    assert effect.mean[-1] - effect.mean[0] > 3
    x = examples.x.clone()
    x[:, :3] = model.encode([{"people": effect.values[-1], "homes": 1.0, "visits": 1.0, "age": 40.0}])[:, :3]
    assert effect.mean[-1] == pytest.approx(float(model.unit.means(model.calibrated(x).mean).mean()), rel=1e-4)
