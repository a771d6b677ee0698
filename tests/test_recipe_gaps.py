"""Gap cross-validation of a recipe: what refits see, what is chosen, and what is kept of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from dapcal.adjust import Inflate, Revert, Unchanged
from dapcal.calibration.gap_choice import GapChoice, paired
from dapcal.calibration.regions import Region
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors import ensemble
from dapcal.recipes import POSTERIORS, Recipe, fit, fitting, gaps
from dapcal.recipes.gaps import FEWEST_ROWS, Gaps, adjustments

QUICK = Recipe(hidden=(16,), epochs=10, members=4, draws=5, learning_rate=0.02, batch_size=32, refit=False)


def numbers(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    y = (2 * x[:, 0]).sin() + x[:, 1] * x[:, 2] + 0.1 * torch.randn(n, generator=generator)
    return x, (y - y.mean()) / y.std()


def rows(x: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in x.tolist()}


@pytest.mark.parametrize(("whole", "members"), [(70, 4), (69, 3)])
def test_refits_see_neither_held_out_rows_nor_their_region(monkeypatch, whole, members):
    seen, real = {}, ensemble.fit_each

    def spy(make, likelihood, train, held_out, **options):
        seen.update(train=train, held_out=held_out, **options)
        return real(make, likelihood, train, held_out, **options)

    parts = []
    monkeypatch.setattr(gaps.ensemble, "fit_each", spy)
    found = gaps._found
    monkeypatch.setattr(gaps, "_found", lambda part, *rest: parts.append(part) or found(part, *rest))
    monkeypatch.setattr(gaps, "MOST_KEPT", 70)
    monkeypatch.setattr(gaps, "WHOLE", whole)
    x, y = numbers(200)
    fitted = fit(x, y, Gaussian(), 1, QUICK)
    held_out, train = rows(fitted.held_out.x), rows(fitted.train.x)
    assert len(parts) == len(seen["train"]) == 12
    assert seen["members"] == members
    for part in parts:
        kept, ordinary, missing = (rows(data.x) for data in (part.kept, part.ordinary, part.missing))
        assert kept | ordinary | missing <= train
        assert not (kept | ordinary | missing) & held_out
        assert not kept & missing
        assert not kept & ordinary
        assert not ordinary & missing
        assert (len(kept), len(ordinary), len(missing)) == (70, 20, len(fitted.train.x) // 3)


def reading(none: list[float], **at) -> Gaps:
    regions = tuple(Region("middle" if n % 2 else "outer", None, torch.arange(9), torch.arange(9)) for n in range(4))
    return Gaps(regions, adjustments(Gaussian(1.0), Recipe()), torch.tensor(none, dtype=torch.float64), at, 1.0)


def peak(height: float, center: float = 0.0):
    """A gain that is largest where log10 of the factor is `center`, and 0 without adjustment."""
    gains = height * torch.tensor([1.0, 1.1, 0.9, 1.0], dtype=torch.float64)

    def at(factor: float) -> torch.Tensor:
        place = math.log10(factor) - center if factor else math.inf
        return gains * math.exp(-(place**2))

    return at


@pytest.mark.parametrize(
    ("inflate", "revert", "guard", "chosen", "kind", "held_back"),
    [
        (1.0, 2.0, 1e6, "Revert", Revert, ()),
        (1.0, 1.0, 1e6, "Inflate", Inflate, ()),
        (-1.0, -1.0, 1e6, "none", Unchanged, ()),
        (-1.0, 0.5, 1e6, "Revert", Revert, ()),
    ],
)
def test_what_gains_is_chosen_and_stored(monkeypatch, inflate, revert, guard, chosen, kind, held_back):
    read = reading([0.0] * 4, Inflate=peak(inflate), Revert=peak(revert))
    monkeypatch.setattr(fitting, "read_gaps", lambda *_: read)
    fitted = fit(*numbers(120), Gaussian(), 1, replace(QUICK, guard=guard))
    assert isinstance(fitted.calibrated.adjust, kind)
    assert (fitted.gaps.chosen, fitted.gaps.held_back) == (chosen, held_back)
    if chosen != "none":
        assert fitted.calibrated.phi == pytest.approx(0.0, abs=0.02), "the factor of the largest mean gain"
    assert any(note.startswith("gap cross-validation chose") for note in fitted.calibrated.notes)


def test_the_guard_is_checked_after_the_choice(monkeypatch):
    # the gain is at factors that destroy held-out predictions, and vanishes at those that the guard allows
    read = reading([0.0] * 4, Inflate=peak(-1.0), Revert=peak(1.0, center=3.5))
    monkeypatch.setattr(fitting, "read_gaps", lambda *_: read)
    fitted = fit(*numbers(120), Gaussian(), 1, replace(QUICK, guard=0.0))
    assert isinstance(fitted.calibrated.adjust, Unchanged)
    assert (fitted.gaps.chosen, fitted.gaps.held_back) == ("none", ("Revert",))
    told = "the guard on held-out rows keeps Revert from gaining"
    assert any(told in note for note in fitted.calibrated.notes)


def test_numbers_stored_are_those_of_the_chosen_phi():
    fitted = fit(*numbers(200), Gaussian(), 1, QUICK)
    choice = fitted.gaps
    assert set(choice.regions[0].after) == {"Inflate", "Revert"}
    assert {read.kind for read in choice.regions} == {"middle", "outer"}
    if choice.chosen != "none":
        none = torch.tensor([read.none for read in choice.regions])
        after = torch.tensor([read.after[choice.chosen] for read in choice.regions])
        assert paired(none, after).counts
    json.dumps(choice.as_json())


def test_classes_choose_between_none_and_inflate():
    x, _ = numbers(150)
    choice = fit(x, (x[:, 0] > 0).long(), Categorical(), 2, QUICK).gaps
    assert isinstance(choice, GapChoice)
    assert set(choice.regions[0].after) == {"Inflate"}


@pytest.mark.parametrize("name", POSTERIORS)
def test_refits_are_of_the_posteriors_own_kind(name, monkeypatch):
    monkeypatch.setattr(gaps, "REGIONS", 3)
    kinds = []
    found = gaps._found
    monkeypatch.setattr(gaps, "_found", lambda *given: kinds.append(given[1]) or found(*given))
    fitted = fit(*numbers(120), Gaussian(), 1, replace(QUICK, posterior=name, epochs=4))
    own = fitted.calibrated.posterior
    assert len(kinds) == 3
    for posterior in kinds:
        assert type(posterior) is type(own)
        assert type(getattr(posterior, "linear", None)) is type(getattr(own, "linear", None))
        assert (posterior.gaussian is None) == (own.gaussian is None)


def test_scaling_reaches_the_refits(monkeypatch):
    noises = []
    found = gaps._found

    def spy(part, posterior, offered, spaces, scaled, share):
        noises.append((scaled, share))
        return found(part, posterior, offered, spaces, scaled, share)

    scaled_with = []
    in_domain = gaps.in_domain
    monkeypatch.setattr(gaps, "_found", spy)
    monkeypatch.setattr(gaps, "in_domain", lambda p, data: scaled_with.append(len(data.x)) or in_domain(p, data))
    helps = fitting.choose_reference
    monkeypatch.setattr(fitting, "choose_reference", lambda *given, **_: helps(*given, scaling=True))
    fit(*numbers(120), Gaussian(), 1, QUICK)
    assert scaled_with == [20] * 12
    assert noises == [(True, 1.0)] * 12


def test_refits_have_the_noise_that_ordinary_rows_say(monkeypatch):
    """Before: that of short training, ten times as large beside trees, so that no adjustment gained anything."""
    seen = []
    in_domain = gaps.in_domain

    def spy(posterior, data):
        seen.append((posterior.likelihood, in_domain(posterior, data), data))
        return seen[-1][1]

    monkeypatch.setattr(gaps, "in_domain", spy)
    own = fit(*numbers(600), Gaussian(), 1, replace(QUICK, epochs=6)).calibrated.posterior
    assert own.blend is not None
    assert len(seen) == 12
    for given, scaled, data in seen:
        assert type(given) is type(own.likelihood)
        outputs = scaled.outputs(data.x)
        location, noise = scaled.likelihood._location_and_noise(outputs)
        residual = (location.mean(0) - data.y).square().mean()
        assert 0.3 < float(residual / (noise.square().mean() + location.var(0, correction=0).mean())) < 3


@pytest.mark.parametrize(("rows", "fast"), [(240, True), (FEWEST_ROWS, False)])
def test_fast_and_small_tables_keep_the_plain_way(rows, fast):
    fitted = fit(*numbers(rows), Gaussian(), 1, replace(QUICK, fast=fast))
    assert fitted.gaps is None
    assert isinstance(fitted.calibrated.adjust, Inflate)


def test_the_report_tells_gains_apart():
    from dapcal.report.questions import gaps as question

    fitted = fit(*numbers(120), Gaussian(), 1, QUICK)
    page = question.section(fitted.gaps)
    assert "Gap cross-validation chose" in page
    middle = sum(read.kind == "middle" for read in fitted.gaps.regions)
    assert f"middle thirds (interpolation), {middle}" in page
    assert f"outer thirds (extrapolation), {12 - middle}" in page
    assert f"{fitted.gaps.gain('Revert', 'outer').mean:+.3f}" in page
    assert "form of the UCI gap benchmark" in page
    assert question.section(None) == ""


@pytest.mark.parametrize("fast", [True, False])
def test_distances_from_some_rows_are_told_and_no_longer_grow_with_the_table(fast):
    x, y = numbers(240)
    fitted = fit(x, y, Gaussian(), 1, replace(QUICK, epochs=4, fast=fast, points=25))
    spaces = (*fitted.calibrated.distance.spaces, *fitted.calibrated.evidence.further)
    assert spaces
    assert all(len(space.metric.index.index.points) == 25 for space in spaces)
    assert any("25 of" in note for note in fitted.calibrated.notes), fitted.calibrated.notes
    with pytest.raises(ValueError, match="`points` >= 1"):
        replace(QUICK, points=0)


def test_distance_widens_members_of_folds_as_much_as_those_before():
    """Before: more, as these lie farther apart, and the spread is what is multiplied."""
    recipe = replace(QUICK, hidden=(32,), epochs=40, fast=True)
    fitted = [fit(*numbers(300), Gaussian(), 1, replace(recipe, refit=refit)) for refit in (False, True)]
    first, again = (one.calibrated for one in fitted)
    assert isinstance(again.adjust, Inflate)
    spread = [own.outputs(fitted[1].held_out.x).std(0, correction=0) for own in (again.before, again.posterior)]
    share = float((spread[0] / spread[1]).median())
    assert share < 0.9
    assert again.factor == pytest.approx(share * first.factor, rel=1e-4)
    far = 30 * fitted[1].held_out.x
    assert float((again(far).epistemic / first(far).epistemic).sqrt().median()) == pytest.approx(1, abs=0.4)
