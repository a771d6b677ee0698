"""The choice among adjustments by gap cross-validation, on numbers made by hand, and the regions it is made in."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dapcal.calibration.gap_choice import GapChoice, Read, chosen, from_json, paired, steps, words
from dapcal.calibration.regions import FEWEST_VALUES, third, thirds

NONE = torch.zeros(4)
CLEAR = torch.tensor([1.0, 1.2, 0.8, 1.0])  # mean 1, standard error 0.082
ONE_REGION_ALONE = torch.tensor([4.0, 0.0, 0.0, 0.0])  # mean 1, standard error 1


def at(*columns: torch.Tensor) -> torch.Tensor:
    return torch.stack(columns, 1)


@pytest.mark.parametrize(
    ("inflate", "revert", "expected"),
    [
        (CLEAR, CLEAR, "Inflate"),  # nothing gained beyond the plainer one
        (CLEAR, CLEAR + ONE_REGION_ALONE, "Inflate"),  # gained in one region alone: not above its standard error
        (CLEAR, 2 * CLEAR, "Revert"),
        (ONE_REGION_ALONE, ONE_REGION_ALONE, "none"),
        (ONE_REGION_ALONE, CLEAR, "Revert"),  # held against none, as Inflate was not taken
        (-CLEAR, -CLEAR, "none"),
        (NONE, NONE, "none"),
        (1e-5 * CLEAR, 2e-5 * CLEAR, "none"),  # clear, and next to nothing
        (CLEAR.log() * math.inf, CLEAR, "Revert"),  # values that are no numbers never win
    ],
)
def test_a_richer_answer_must_gain_more_than_its_standard_error(inflate, revert, expected):
    found = steps(NONE, {"Inflate": at(inflate), "Revert": at(revert)})
    assert chosen(found) == expected


def test_the_best_factor_is_that_of_the_mean_over_regions():
    values = at(CLEAR, torch.tensor([5.0, 0.0, 0.0, 0.0]), torch.full((4,), 1.1), torch.tensor([9.0, -9.0, 1.0, 1.0]))
    (step,) = steps(NONE, {"Inflate": values})
    assert step.place == 1, "the largest mean, whatever its standard error"
    assert (step.gain.mean, step.taken) == (1.25, False)
    assert step.gain.error == pytest.approx(1.25)


def test_paired_gains_are_those_of_a_paired_t_test():
    from scipy.stats import ttest_rel

    generator = torch.Generator().manual_seed(0)
    before, after = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    gain = paired(before, after)
    assert gain.mean / gain.error == pytest.approx(float(ttest_rel(after, before).statistic))
    assert not paired(before[:1], before[:1] + 5).counts, "one region alone has no standard error"


def test_gains_are_read_by_kind_and_come_back_from_json():
    import json

    reads = [("middle", 0.0, 1.0, 1.5), ("outer", -1.0, 3.0, 3.0), ("middle", 0.5, 2.5, 1.5), ("outer", 0.0, 2.0, 4.0)]
    regions = tuple(Read(kind, 2, 7, none, {"Inflate": i, "Revert": r}) for kind, none, i, r in reads)
    choice = GapChoice("Inflate", regions, ("Revert",))
    assert choice.gain("Inflate").mean == pytest.approx((1 + 4 + 2 + 2) / 4)
    assert choice.gain("Inflate", "middle") == (1.5, 0.5)
    assert choice.gain("Inflate", "outer") == (3.0, 1.0)
    assert choice.gain("Revert", "outer", over="Inflate") == (1.0, 1.0)
    assert words(choice) == (
        "gap cross-validation chose Inflate: in 4 regions that were left out of training in turn, Inflate gains "
        "+2.250 ± 0.629 nats a row (between the data +1.500 ± 0.500, beyond them +3.000 ± 1.000); the guard on "
        "held-out rows keeps Revert from gaining"
    )
    assert "chose no adjustment: in 4 regions" in words(replace(choice, chosen="none"))
    assert from_json(json.loads(json.dumps(choice.as_json()))) == choice


@pytest.mark.parametrize("n", [9, 30, 31, 32])
@pytest.mark.parametrize(("kind", "upper"), [("middle", False), ("outer", False), ("outer", True)])
def test_thirds_lie_where_they_should(n, kind, upper):
    along = torch.randn(n, generator=torch.Generator().manual_seed(n))
    missing, rest = third(along, kind, upper)
    assert sorted([*missing.tolist(), *rest.tolist()]) == list(range(n))
    assert len(missing) == n // 3
    below, above = (along[rest] < along[missing].min()).sum(), (along[rest] > along[missing].max()).sum()
    assert below + above == len(rest)
    assert (below > 0, above > 0) == {"middle": (True, True), "outer": (upper, not upper)}[kind]
    assert kind == "outer" or abs(below - above) <= 1


def test_regions_are_of_all_four_sorts_and_differ():
    x = torch.randn(90, 5, generator=torch.Generator().manual_seed(0))
    found = thirds(x, torch.Generator().manual_seed(1))
    sorts = [(region.kind, region.column is None) for region in found]
    assert {sort: sorts.count(sort) for sort in sorts} == dict.fromkeys(
        [("middle", True), ("middle", False), ("outer", True), ("outer", False)], 3
    )
    assert len({frozenset(region.missing.tolist()) for region in found}) == 12
    for region in found:
        assert sorted([*region.missing.tolist(), *region.rest.tolist()]) == list(range(90))
        if region.column is not None:
            values = x[:, region.column]
            inside = (values >= values[region.missing].min()) & (values <= values[region.missing].max())
            assert torch.equal(inside.nonzero().flatten(), region.missing.sort().values)
    assert {len(region.rest) for region in found} == {60}
    again = thirds(x, torch.Generator().manual_seed(1))
    assert all(torch.equal(a.missing, b.missing) for a, b in zip(found, again, strict=True))


def test_columns_with_few_values_are_passed_over():
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(FEWEST_VALUES - 1, (60, 3), generator=generator).float()
    mixed = torch.cat([few, torch.randn(60, 1, generator=generator)], 1)
    assert {region.column for region in thirds(mixed, generator)} == {None, 3}
    assert {region.column for region in thirds(few, generator)} == {None}
    assert len(thirds(few, generator)) == 12


def test_one_column_has_three_thirds():
    x = torch.linspace(0, 1, 30)[:, None]
    found = thirds(x, torch.Generator().manual_seed(0))
    assert sorted(region.missing.sort().values[0].item() for region in found) == [0, 10, 20]
