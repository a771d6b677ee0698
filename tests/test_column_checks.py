"""Evidence column by column: tails, decimals, what was seen, what other columns let expect."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dapcal.distances.column_checks import ABOVE, FINE, MISSING, RARE, UNLIKE, fit_checks
from dapcal.distances.column_statistics import Part, decimals, fit_likeness, fit_seen, places_of
from dapcal.distances.tails import fit_tails
from dapcal.metrics import auroc


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("rows", [50, 5000])
def test_surprise_is_the_share_of_training_rows_that_reach_a_value(rows):
    train = torch.randn(3, rows, generator=generator()).round(decimals=1)
    tails = fit_tails(train, torch.zeros(3, dtype=torch.bool))
    values = train[:, :40]
    reached = (train[:, None, :] >= values[:, :, None]).sum(2)
    exact = -((reached + 1).double() / (rows + 1)).log()
    torch.testing.assert_close(tails(values), exact, atol=1e-12 if rows == 50 else 0.02, rtol=0)


def test_surprise_grows_beyond_all_training_rows_and_rows_that_say_nothing_do_not_count():
    train = torch.arange(100.0).repeat(2, 1)
    train[:, 50:60] = -torch.inf
    tails = fit_tails(train, torch.tensor([False, True]))
    values = torch.tensor([99.0, 100.0, 1000.0, -torch.inf])
    heavy, nats = tails(values.repeat(2, 1))
    base = math.log(91)
    assert heavy.tolist() == pytest.approx(
        [math.log(91 / 2), base + 2 * math.log(1 + 1 / 9), base + 2 * math.log(1 + 901 / 9), 0]
    )
    assert nats.tolist() == pytest.approx([math.log(91 / 2), base + 1, base + 901, 0])


def test_decimals_are_those_of_the_number_in_its_unit():
    values = torch.tensor([1.25, 3.0, 40.0, 2.2, 100.001, 7.0 / 3], dtype=torch.float64)
    x = ((values - 12) / 31).float()
    assert decimals(x, 12.0, 31.0).tolist() == [2, 0, -1, 1, 3, 9]


def test_residuals_are_those_of_regressions_on_all_other_columns():
    random = np.random.default_rng(0)
    z = random.normal(size=(4, 400)) + random.normal(size=400)
    edges = torch.from_numpy(np.concatenate([z, np.zeros_like(z)]))
    parts = [Part(number=place) for place in range(4)]
    likeness = fit_likeness(edges, torch.zeros(400, 4), parts)
    compared = likeness.compared(edges, torch.zeros(400, 4))
    standard = ((compared.T - compared.mean(1)) / compared.std(1, correction=0)).numpy()
    for place in range(4):
        others = np.delete(standard, place, 1)
        gram = 0.99 * others.T @ others / 400
        np.fill_diagonal(gram, 1)  # shrunk as the whole is
        weights = np.linalg.solve(gram, 0.99 * others.T @ standard[:, place] / 400)
        variance = 1 - weights @ (0.99 * others.T @ standard[:, place] / 400)
        expected = np.abs(standard[:, place] - others @ weights) / math.sqrt(variance)
        np.testing.assert_allclose(likeness(compared)[place], expected, rtol=1e-8)


COUNT = 30  # columns


@pytest.fixture(scope="module")
def wide():
    """Thirty correlated whole numbers with marks, and a category of three levels with marks for missing and unknown."""
    draws = torch.randn(1500, COUNT, generator=generator(1)) + torch.randn(1500, 1, generator=generator(2))
    values = (50 + 10 * draws).round()
    center, scale = values.mean(0), values.std(0)
    level = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), 1500, True, generator=generator(3))
    codes = torch.zeros(1500, 5).scatter(1, level[:, None], 1.0)
    x = torch.cat([(values - center) / scale, torch.zeros(1500, COUNT), codes], 1)
    parts = [Part(number=j, missing=COUNT + j, center=float(center[j]), scale=float(scale[j])) for j in range(COUNT)]
    start = 2 * COUNT
    parts.append(Part(codes=tuple(range(start, start + 5)), missing=start + 3))
    return x, parts, fit_checks(x[:1000], parts)


def in_unit(x: torch.Tensor, parts: list[Part], place: int, factor: float) -> torch.Tensor:
    changed, part = x.clone(), parts[place]
    changed[:, place] = (factor * (part.center + part.scale * x[:, place]) - part.center) / part.scale
    return changed


def test_one_wrong_unit_among_thirty_columns_is_found_and_named(wide):
    x, parts, checks = wide
    ordinary = checks(x[1000:])
    for factor, kind in ((2.2, None), (10.0, ABOVE), (0.1, None)):
        wrong = in_unit(x[1000:], parts, 7, factor)
        assert auroc(checks(wrong), ordinary) > 0.97
        found = checks.findings(wrong)
        assert np.mean([7 in [finding.column for finding in row] for row in found]) > 0.9
        if kind:
            assert np.mean([row[0][:2] == (7, kind) for row in found]) > 0.8
    fraction = in_unit(x[1000:1001], parts, 3, 1.0)
    fraction[:, 3] += 0.003 / parts[3].scale
    assert checks.findings(fraction)[0][0][:2] in ((3, FINE), (3, RARE))


def test_a_number_that_the_others_contradict_is_found(wide):
    x, _, checks = wide
    low = x[1000:][x[1000:, :COUNT].mean(1) < -0.5][:20].clone()
    before = checks.surprises(low)
    low[:, 4] = x[:1000, 4].quantile(0.9)  # an ordinary value, elsewhere
    place = checks.checks.index((4, UNLIKE))
    assert (checks.surprises(low)[place] > 3).double().mean() > 0.9
    assert (before[place] > 3).double().mean() < 0.2


def test_unseen_levels_and_missing_cells(wide):
    x, _, checks = wide
    ordinary = checks(x[1000:])
    unseen = x[1000:].clone()
    unseen[:, 2 * COUNT :] = torch.tensor([0.0, 0, 0, 0, 4])
    assert auroc(checks(unseen), ordinary) > 0.95
    assert checks.findings(unseen)[0][0][:2] == (COUNT, RARE)
    blank = torch.zeros_like(x[:1])
    blank[:, COUNT : 2 * COUNT], blank[:, 2 * COUNT + 3] = 1.0, 1.0
    assert float(checks(blank)[0]) > float(ordinary.max())
    assert {finding.kind for finding in checks.findings(blank, most=40)[0]} == {MISSING}
    assert len(checks.findings(blank, most=40)[0]) == COUNT + 1


def test_rows_do_not_depend_on_their_neighbours_in_a_batch(wide):
    x, _, checks = wide
    torch.testing.assert_close(checks(x[:7]), torch.cat([checks(x[:3]), checks(x[3:7])]))
    assert float(checks.joint(x[:7])) == float(checks(x[:7]).max())


def test_categories_alone_and_one_number_alone():
    codes = torch.eye(3)[torch.arange(60) % 3]
    checks = fit_checks(torch.cat([codes, torch.zeros(60, 2)], 1), [Part(codes=(0, 1, 2, 3, 4), missing=3)])
    assert checks(torch.tensor([[0.0, 0, 0, 0, 4]])) > checks(torch.tensor([[1.0, 0, 0, 0, 0]])) + 1
    single = fit_checks(torch.linspace(-1, 1, 50)[:, None], [Part(number=0)])
    assert single(torch.tensor([[30.0]])) > single(torch.tensor([[0.0]])) + 1


def test_categories_of_few_and_many_levels_are_looked_up_alike():
    x = torch.zeros(90, 7)
    x[:, 0] = 1
    x[:30, 0], x[:30, 1] = 0, 1
    x[torch.arange(90), 2 + torch.arange(90) % 5] = 1
    parts = (Part(codes=(0, 1)), Part(codes=(2, 3, 4, 5, 6), missing=6))
    seen, places = fit_seen(x, parts), places_of(parts, x.device)
    found = seen.codes(x, places).exp().reciprocal() * 91 - 0.5
    torch.testing.assert_close(found[0], torch.where(x[:, 1] > 0, 30.0, 60.0).double())
    torch.testing.assert_close(found[1], torch.full((90,), 18.0).double())
    blank = seen.blank(x, places)
    assert not blank[0].any()
    assert torch.equal(blank[1] > 0, x[:, 6] > 0)
    nothing = torch.zeros(1, 7)  # no level at all: the first one
    assert torch.equal(seen.codes(nothing, places)[:, 0], seen.codes(x[[45, 50]], places).diagonal())


@pytest.mark.parametrize("rows", [1, 300])
def test_findings_are_those_of_a_straight_look_at_every_row(rows):
    train = torch.randn(400, 5, generator=generator(1))
    train[:, 1] = (train[:, 1] > 1).float()
    train[::7, 0], train[:, 3] = 0.0, train[:, 2] + 0.1 * train[:, 3]
    train[train[:, 1] > 0, 0] = 0.0
    parts = [Part(number=0, missing=1), Part(number=2), Part(number=3), Part(codes=(4,))]
    checks = fit_checks(train, parts)
    asked = 2 * torch.randn(rows, 5, generator=generator(2))
    asked[:, 1] = (asked[:, 1] > 1).float()
    surprises, blank = checks.surprises(asked), checks.seen.blank(asked, checks._places)
    for row, found in enumerate(checks.findings(asked, most=2)):
        own = surprises[:, row].tolist()
        places = sorted({own.index(max(own)), *(place for place, s in enumerate(own) if s >= checks.enough())})
        named = []
        for place in places:
            column, kind = checks.checks[place]
            if column is None:
                named += [(float(blank[cell, row]), cell, MISSING) for cell in range(4) if blank[cell, row]]
            else:
                named.append((own[place], column, MISSING if blank[column, row] else kind))
        named.sort(key=lambda one: -one[0])
        first = {column: (column, kind, s) for s, column, kind in reversed(named)}
        expected = [first[column] for column in dict.fromkeys(column for _, column, _ in named)][:2]
        assert [tuple(finding) for finding in found] == expected
