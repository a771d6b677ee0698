"""Explanations against brute force over the training inputs and against the prediction itself."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import report_cases
from cases import doubles
from dapcal.distances import Distance, FittedSpace, mmd, nearest
from dapcal.distances.projectors import Identity, project
from dapcal.explain import explain, explainer, far_columns
from dapcal.explain_words import verdict


@pytest.fixture(scope="module")
def table():
    return report_cases.table()


@pytest.fixture(scope="module")
def explained(table):
    """A row of the other kind, whose first and fifth column are far."""
    return explain(table.calibrated, table.train.x, table.new[70:71], table.features)


def test_neighbours_are_those_of_brute_force_in_every_space(table, explained):
    spaces = table.calibrated.distance.spaces
    assert [reach.space for reach in explained.spaces] == [space.name for space in spaces]
    for space, reach in zip(spaces, explained.spaces, strict=True):
        train, x = (project(space.projector, inputs).double() for inputs in (table.train.x, table.new[70:71]))
        distances, rows = (train - x).norm(dim=1).sort()
        assert reach.nearest.rows == tuple(rows[:5].tolist())
        assert_close(doubles(reach.nearest.distances), distances[:5], atol=1e-5, rtol=1e-5)
        assert reach.raw == pytest.approx(float(distances[0]), rel=1e-5)
        assert reach.pre_distance == pytest.approx(max(0, (reach.raw - space.radius.start) / space.radius.unit))
        assert reach.radius == space.radius.start
    flat = (table.train.x - table.new[70]).norm(dim=1).argsort()[:5]
    assert explained.nearest.rows == tuple(flat.tolist())
    assert explained.farthest.pre_distance == max(reach.pre_distance for reach in explained.spaces)


def test_numbers_are_those_of_the_prediction(table, explained):
    prediction = table.calibrated(table.new[70:71])
    for answer, given in ((explained.before, prediction.base), (explained.after, prediction)):
        lower, upper = given.interval(0.95)
        assert answer.mean == pytest.approx(given.mean[0].tolist())
        assert answer.deviation == pytest.approx(given.variance[0].sqrt().tolist())
        assert (*answer.lower, *answer.upper) == pytest.approx((float(lower), float(upper)))
        assert answer.epistemic == pytest.approx(given.epistemic[0].tolist())
    assert explained.p_value == pytest.approx(float(prediction.ood_p_value))
    assert explained.distance == pytest.approx(table.calibrated.factor * explained.pre_distance)
    assert explained.after.deviation > explained.before.deviation


def test_shares_are_those_of_the_squared_distance(table, explained):
    squared = (table.train.x[list(explained.nearest.rows)] - table.new[70]) ** 2  # (k, P)
    by_hand = dict.fromkeys(table.features, 0.0)
    for name, value in zip(table.features, squared.mean(0).tolist(), strict=True):
        by_hand[name] += value
    for column in explained.columns:
        assert column.difference == pytest.approx(by_hand[column.name] ** 0.5, rel=1e-5)
        assert column.share == pytest.approx(by_hand[column.name] / sum(by_hand.values()), rel=1e-5)
    assert sum(column.share for column in explained.columns) == pytest.approx(1)
    assert {column.name for column in explained.columns[:2]} == {"area", "distance to centre"}
    assert [column.share for column in explained.columns] == sorted((c.share for c in explained.columns), reverse=True)


def test_columns_beyond_the_training_values_are_marked(table, explained):
    columns = {column.name: column for column in explained.columns}
    assert len(columns) == 10
    assert columns["area"].is_far
    assert columns["distance to centre"].is_far
    for place, name in enumerate(table.features[:9]):
        values, value = table.train.x[:, place], table.new[70, place]
        assert columns[name].is_outside == bool((value < values.min()) | (value > values.max()))
        assert columns[name].percentile == pytest.approx(float((values < value).float().mean()), abs=1e-6)
        assert columns[name].seen == 0
    assert columns["town"].percentile is None
    same = (table.train.x[:, 9:] == table.new[70, 9:]).all(1).float().mean()
    assert columns["town"].seen == pytest.approx(float(same))


def test_about_one_ordinary_row_in_twenty_has_a_far_column(table):
    one = explainer(table.calibrated, table.train.x, table.features)
    far = [any(c.is_far for c in one(table.held_out.x[i : i + 1]).columns) for i in range(60)]
    assert sum(far) <= 9


def test_what_is_usual_is_a_quantile_of_training_inputs_among_themselves(table):
    one = explainer(table.calibrated, table.train.x, table.features, neighbours=3)
    x = table.train.x.double()
    distances = torch.cdist(x, x).fill_diagonal_(torch.inf)
    rows = distances.argsort(1)[:, :3]
    area = ((x[:, None, 0] - x[rows][..., 0]) ** 2).mean(1).sqrt()
    assert float(one.usual[0]) == pytest.approx(float(area.quantile(1 - 0.05 / 10)), rel=1e-4)


def test_training_inputs_that_stand_several_times(table):
    """Among more copies than neighbours an input need not meet itself."""
    train = table.train.x[:20].repeat(15, 1)
    spaces = tuple(
        replace(space, metric=nearest(project(space.projector, train))) for space in table.calibrated.distance.spaces
    )
    calibrated = replace(table.calibrated, distance=Distance(spaces))
    one = explainer(calibrated, train, table.features)
    assert not one.usual.any()
    columns = {column.name: column for column in one(train[3:4]).columns}
    values = train[:, 0]
    below, equal = (values < values[3]).double().mean(), (values == values[3]).double().mean()
    assert columns["area"].percentile == pytest.approx(float(below + equal / 2))
    assert columns["area"].seen == pytest.approx(15 / 300)
    assert not any(column.is_far or column.is_outside for column in columns.values())


def test_one_code_beyond_the_others_puts_the_column_outside(table):
    x = table.train.x[:1].clone()
    x[0, 9:] = torch.tensor([0.0, 0.0, 1.5])
    town = {column.name: column for column in explain(table.calibrated, table.train.x, x, table.features).columns}[
        "town"
    ]
    assert town.is_outside
    assert town.seen == 0  # though a third of the training rows have each of its first two codes


def test_the_space_that_decides_has_the_largest_excess_then_the_largest_share_of_its_radius(explained):
    one, two = explained.spaces

    def decides(first, second):
        spaces = (replace(one, **first), replace(two, **second))
        return spaces.index(replace(explained, spaces=spaces).farthest)

    assert decides({"pre_distance": 2.0, "raw": 1.0}, {"pre_distance": 1.0, "raw": 9.0}) == 0
    inside = {"pre_distance": 0.0, "radius": 2.0}
    assert decides({**inside, "raw": 1.0}, {**inside, "raw": 1.5}) == 1
    assert decides({**inside, "raw": 1.0}, {**inside, "raw": 1.5, "radius": 10.0}) == 0


def test_distances_in_words_have_no_powers_of_ten(explained):
    """They read 1.41e+03 and 1.23e+04."""
    far = replace(explained.farthest, raw=1412.3, radius=12345.6, pre_distance=9.0)
    said = verdict(replace(explained, spaces=(far,)), 0.05)
    assert "it lies 1412 from the training rows" in said
    assert "where up to 12,346 (the radius) is usual" in said


def test_json_holds_all_of_it(explained):
    read = json.loads(json.dumps(explained.as_json(), allow_nan=False))
    assert read == explained.as_json()
    assert read["columns"][0]["name"] == explained.columns[0].name
    assert read["spaces"][0]["nearest"]["rows"] == list(explained.spaces[0].nearest.rows)


def test_a_training_input_is_its_own_neighbour_and_nothing_changes(table):
    found = explain(table.calibrated, table.train.x, table.train.x[3:4], table.features, neighbours=1)
    assert found.nearest.rows == (3,)
    assert found.nearest.distances == (0.0,)
    assert found.pre_distance == 0
    assert found.before == found.after


def test_a_metric_without_neighbours_falls_back_to_inputs(table):
    space = FittedSpace("kernel", Identity(), mmd(table.train.x), None)
    calibrated = replace(table.calibrated, distance=Distance((space,)))
    calibrated = replace(
        calibrated, evidence=replace(calibrated.evidence, further=(), weights=None, **_first(calibrated.evidence, 2))
    )
    found = explain(calibrated, table.train.x, table.new[:1], table.features)
    assert found.spaces[0].nearest == found.nearest
    assert found.nearest.space == "inputs"
    assert found.spaces[0].radius is None


def _first(evidence, pieces):
    fields = ("center", "scale", "held_out_pieces")
    return {name: getattr(evidence, name)[:pieces] for name in fields}


def test_classes_and_images():
    subject = report_cases.images()
    found = explain(subject.calibrated, subject.train.x, subject.new[:1], neighbours=2)
    assert found.columns == ()
    assert sum(found.after.mean) == pytest.approx(1)
    assert found.after.deviation == ()
    assert max(found.after.mean) <= max(found.before.mean)
    assert len(found.nearest.rows) == 2


def test_columns_without_names_are_counted():
    subject = report_cases.one_column()
    assert explain(subject.calibrated, subject.train.x, subject.train.x[:1]).columns[0].name == "column 1"


def test_what_cannot_be_explained(table):
    calibrated, train = table.calibrated, table.train.x
    with pytest.raises(ValueError, match="explain them one by one"):
        explain(calibrated, train, train[:2])
    with pytest.raises(ValueError, match="all of them, in the same order"):
        explain(calibrated, train[:-1], train[:1])
    with pytest.raises(ValueError, match="repeat the name of a column"):
        explain(calibrated, train, train[:1], ("a", "b"))
    with pytest.raises(ValueError, match=f"between 1 and {len(train)}"):
        explain(calibrated, train, train[:1], neighbours=0)
    images = report_cases.images()
    with pytest.raises(ValueError, match="leave them out"):
        explain(images.calibrated, images.train.x, images.new[:1], ("a",))


def test_far_columns_of_many_rows_are_those_of_every_row(table):
    one_by_one = explainer(table.calibrated, table.train.x, table.features)
    x = table.new[50:90]
    found = far_columns(table.train.x, table.features)(x, most=99)
    some = far_columns(table.train.x, table.features, most=30)(x)
    for place, row in enumerate(found):
        columns = one_by_one(x[place : place + 1]).columns
        expected = [column.name for column in columns if column.is_far or column.is_outside]
        assert list(row) == (expected or [columns[0].name])
        assert all(row.values()) == bool(expected)
        assert 1 <= len(some[place]) <= 3
    assert {len(row) for row in found} != {1}
