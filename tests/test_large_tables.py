"""Tables that are too large to hold: a sample says all but the weights, which learn from the other rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from dapcal import mapped, tables
from dapcal.data import Labelled
from dapcal.mapped import is_mapped
from dapcal.models import large_tables
from dapcal.models.loading import load
from dapcal.networks import Tempered
from dapcal.recipes import Fitted, Recipe, many_rows, trained_on
from dapcal.tables import sampling
from dapcal.tables.sampling import drawn
from table_cases import run

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")
SMALL = Recipe(hidden=(8,), epochs=4, members=2, fast=True)


@pytest.fixture
def small(monkeypatch):
    """Hundreds of rows are too many to hold, and nothing is small enough for memory."""
    monkeypatch.setattr(sampling, "MOST_CELLS", 1500)
    monkeypatch.setattr(sampling, "MOST_ROWS", 200)
    monkeypatch.setattr(mapped, "IN_MEMORY", 0)
    monkeypatch.setattr("dapcal.tables.files.BATCH_ROWS", 64)


def batches(n: int, size: int = 10) -> list[pa.Table]:
    table = pa.table({"row": np.arange(n), "text": [f"t{i}" for i in range(n)]})
    return [table.slice(start, size) for start in range(0, n, size)]


def houses(n: int = 700, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    area, city = random.normal(80, 20, n), random.choice(["Rome", "Oslo"], n)
    kind = np.where(area > 80, "large", "small").astype(object)
    columns = {"row": np.arange(n), "area": area, "city": city, "price": 3 * area + random.normal(0, 5, n)}
    return pa.table({**columns, "kind": kind})


def test_a_table_that_can_be_held_is_all_there(monkeypatch):
    monkeypatch.setattr(sampling, "MOST_CELLS", 100)
    found = drawn(batches(50), 0)
    assert found.is_all
    assert found.table["row"].to_pylist() == found.places.tolist() == list(range(50))
    assert not found.counters()


def test_a_sample_is_in_order_and_of_its_size(monkeypatch):
    monkeypatch.setattr(sampling, "MOST_CELLS", 100)
    monkeypatch.setattr(sampling, "MOST_ROWS", 30)
    found = drawn(batches(333), 0)
    assert (len(found.table), found.rows, found.is_all) == (30, 333, False)
    assert found.table["row"].to_pylist() == found.places.tolist() == sorted(found.places)
    assert found.table["text"].to_pylist() == [f"t{place}" for place in found.places]
    assert found.places.tolist() == drawn(batches(333), 0).places.tolist()
    assert found.places.tolist() != drawn(batches(333), 1).places.tolist()
    others = pa.concat_tables(found.others(batches(333, 17)))
    assert sorted([*others["row"].to_pylist(), *found.places]) == list(range(333))


def test_every_row_has_the_same_chance(monkeypatch):
    monkeypatch.setattr(sampling, "MOST_CELLS", 20)
    monkeypatch.setattr(sampling, "MOST_ROWS", 10)
    count = np.zeros(40)
    for seed in range(400):
        count[drawn(batches(40, 7), seed).places] += 1
    assert abs(count - 100).max() < 4 * np.sqrt(400 * 0.25 * 0.75)  # four standard deviations


def test_wide_tables_have_fewer_rows_in_the_sample(monkeypatch):
    monkeypatch.setattr(sampling, "MOST_CELLS", 100)
    wide = pa.table({f"c{i}": np.arange(50) for i in range(10)})
    assert len(drawn([wide], 0).table) == 10


def test_columns_that_count_the_rows_are_found_in_a_sample(monkeypatch):
    monkeypatch.setattr(sampling, "MOST_CELLS", 100)
    monkeypatch.setattr(sampling, "MOST_ROWS", 30)
    n = 200
    random = np.random.default_rng(0)
    columns = {
        "from zero": np.arange(n),
        "years": 5 * np.arange(n),
        "any": random.integers(0, 50, n),
        "fractions": np.arange(n) + 0.5,
        "gaps": pa.array([None if i % 2 else i for i in range(n)]),
        "text": [str(i) for i in range(n)],
    }
    assert drawn([pa.table(columns)], 0).counters() == ["from zero"]


def test_ids_in_any_order_are_found_in_a_sample(monkeypatch):
    monkeypatch.setattr(sampling, "MOST_CELLS", 400)
    monkeypatch.setattr(sampling, "MOST_ROWS", 100)
    n = 200
    random = np.random.default_rng(0)
    columns = {
        "shuffled": random.permutation(n),
        "with gaps": 7000 + random.permutation(700)[:n],
        "amounts": random.permutation(100 * n)[:n],
        "repeated": random.integers(0, 700, n),
    }
    assert drawn([pa.table(columns)], 0).counters() == ["shuffled", "with gaps"]
    few = drawn([pa.table(columns)], 0)
    assert not few._replace(table=few.table.slice(0, 61)).counters()[1:], "of so few none need be there twice"


@pytest.mark.parametrize("target", ["price", "kind"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_fit_streams_what_it_cannot_hold(target: str, suffix: str, small, tmp_path: Path):
    path, out = tmp_path / f"houses.{suffix}", tmp_path / "house.dap"
    write = pa.csv.write_csv if suffix == "csv" else pa.parquet.write_table
    write(houses(), path)
    drop = "kind" if target == "price" else "price"
    arguments = ("--target", target, "--drop", drop, "-o", out, "--epochs", 4, "--hidden", "8")
    result = run("fit", path, *arguments)
    assert result.exit_code == 0, result.output
    told = " ".join(result.stderr.split())
    assert "the table has 700 rows, too many to hold" in told
    assert "are those of 200 rows drawn at random" in told
    assert "column `row` numbers the rows" in told
    model = load(out)
    assert len(model.train.x) + len(model.held_out.x) == 200
    assert any("500 other rows, 4 times each" in note for note in model.calibrated.notes)
    new, predicted = tmp_path / "new.parquet", tmp_path / "out.csv"
    pa.parquet.write_table(houses(20, seed=1).drop_columns([target]), new)
    assert run("predict", out, new, "-o", predicted).exit_code == 0
    assert len(predicted.read_text().splitlines()) == 21


def sampled(path: Path):
    return tables.sample(path), lambda kinds: tables.stream(path, kinds)


def test_fast_learns_from_the_sample_alone(small, tmp_path: Path):
    path = tmp_path / "houses.parquet"
    pa.parquet.write_table(houses().drop_columns(["kind"]), path)
    sample, _ = sampled(path)

    def stream(_):
        raise AssertionError("nobody reads the other rows")

    recipe = Recipe(hidden=(8,), epochs=4, members=2, fast=True, refit=False)
    model = large_tables.fit(sample, stream, "price", recipe=recipe)
    assert model.calibrated.before is None
    assert model.recipe == recipe


def test_other_rows_are_in_a_file_and_in_no_sample(small, tmp_path: Path, monkeypatch):
    path = tmp_path / "houses.parquet"
    table = houses().drop_columns(["kind"])
    pa.parquet.write_table(table, path)
    seen = []

    def watched(fitted, others, *arguments):
        seen.append(others)
        return trained_on(fitted, others, *arguments)

    monkeypatch.setattr("dapcal.recipes.trained_on", watched)
    sample, stream = sampled(path)
    model = large_tables.fit(sample, stream, "price", recipe=SMALL)
    (others,) = seen
    assert is_mapped(others.x)
    prices = model.target.decode(others.y).flatten()
    expected = np.delete(table["price"].to_numpy(), sample.places)
    assert np.allclose(prices, expected, atol=1e-4)
    assert model.calibrated.before is not None
    assert model.calibrated.posterior.likelihood.conformal is not None


def test_what_the_sample_lacks_is_told(small, tmp_path: Path):
    path = tmp_path / "houses.parquet"
    table = houses()
    sample = drawn(table.to_batches(max_chunksize=64) and [table.slice(i, 64) for i in range(0, 700, 64)], 0)
    others = np.setdiff1d(np.arange(700), sample.places)
    kind, city, area = (np.array(table[name].to_pylist(), object) for name in ("kind", "city", "area"))
    kind[others[0]], kind[others[1]], city[others[2]], area[others[3]] = "odd", None, "Bonn", None
    kind[sample.places[0]] = "once"
    table = pa.table({"area": pa.array(area.tolist()), "city": city.tolist(), "kind": kind.tolist()})
    pa.parquet.write_table(pa.table({**{n: table[n] for n in table.column_names}, "x": np.ones(700)}), path)
    sample, stream = sampled(path)
    model = large_tables.fit(sample, stream, "kind", recipe=SMALL)
    told = " ".join(model.notes)
    assert "2 rows have no `kind`, or one that the sample lacks: left out" in told
    assert "`city`: 1 rows have a level that the sample lacks" in told
    assert "`area`: 1 rows have no value" in told
    assert "classes of `kind` has a single row (" in told
    assert model.classes == ("large", "small")


def test_no_target_beside_the_sample_is_refused(small, tmp_path: Path):
    path = tmp_path / "houses.parquet"
    pa.parquet.write_table(houses().drop_columns(["kind"]), path)
    sample, stream = sampled(path)

    def without(kinds):
        for batch in stream(kinds):
            place = batch.column_names.index("price")
            yield batch.set_column(place, "price", pa.nulls(len(batch), pa.float64()))

    with pytest.raises(ValueError, match="No row beside the sample has a value of `price`"):
        large_tables.fit(sample, without, "price", recipe=SMALL)


def fitted(tmp_path: Path) -> Fitted:
    path = tmp_path / "houses.parquet"
    pa.parquet.write_table(houses().drop_columns(["kind"]), path)
    model = large_tables.fit(
        sampled(path)[0], lambda _: (), "price", recipe=Recipe(hidden=(8,), members=2, fast=True, refit=False)
    )
    return Fitted(model.calibrated, model.train, model.held_out)


def test_members_that_learnt_nothing_better_are_not_taken(small, tmp_path: Path, monkeypatch):
    known = fitted(tmp_path)
    recipe = Recipe(hidden=(8,), epochs=4, members=2, fast=True)
    monkeypatch.setitem(many_rows.MOST_SEEN, "ensemble", 100)
    others = Labelled(known.train.x, torch.randn_like(known.train.y))  # the targets say nothing
    same = trained_on(known, others, 1, recipe, lambda *_: None)
    assert same.posterior is known.calibrated.posterior
    assert "100 other rows, 4 times each, are not better at held-out rows" in same.notes[-1]


def test_posteriors_that_cannot_be_trained_again_stay(small, tmp_path: Path):
    known = fitted(tmp_path)
    others = Labelled(known.train.x, known.train.y)
    assert trained_on(known, others, 1, Recipe(posterior="laplace"), lambda *_: None) is known.calibrated


def test_epochs_are_as_many_as_rows_allow(small, tmp_path: Path, monkeypatch):
    known = fitted(tmp_path)
    recipe = Recipe(hidden=(8,), members=2, fast=True)
    monkeypatch.setitem(many_rows.MOST_SEEN, "ensemble", 3 * len(known.train.x) + 5)
    stages: list[tuple[str, int, int | None]] = []
    others = Labelled(known.train.x, known.train.y)
    trained_on(known, others, 1, recipe, lambda *told: stages.append(told))
    assert stages[-1] == ("training on all rows", 6, 6)  # two members, three epochs


def test_weights_are_refused_where_rows_are_too_many_to_hold(small, tmp_path):
    path = tmp_path / "houses.parquet"
    pyarrow.parquet.write_table(houses(), path)
    sample = tables.sample(path)
    for given in ({"weight": "area"}, {"class_weights": "balanced"}):
        with pytest.raises(ValueError, match="count alike"):
            large_tables.fit(sample, lambda kinds: tables.stream(path, kinds), "kind", recipe=Recipe(), **given)


def test_logarithms_are_learnt_of_all_rows_by_the_same_network(small, tmp_path: Path):
    """The first layer tempers numbers in the sample's networks and in those of all rows, and after loading."""
    table = houses()
    positive = pa.array(np.exp(table["price"].to_numpy() / 100))
    table = table.set_column(table.column_names.index("price"), "price", positive)
    pyarrow.parquet.write_table(table, tmp_path / "house.parquet")
    done = run("fit", tmp_path / "house.parquet", "--target", "price", "--log", "--epochs", 4, "--hidden", "8",
               "-o", tmp_path / "house.dap", "--drop", "kind")  # fmt: skip
    assert done.exit_code == 0, done.output
    model = load(tmp_path / "house.dap")
    assert model.recipe.logarithms
    assert isinstance(model.calibrated.posterior.network[0], Tempered)
    far = pa.table({"area": [80.0, 4000.0], "city": ["Rome", "Rome"]})
    assert max(model.predict(far).table["prediction"].to_pylist()) < 100 * max(positive.to_pylist())
