"""What stands beside the sum of evidence: nearest rows among those that train and that choose; p-values."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import dapcal
from dapcal import deploy
from dapcal.beside import NEAREST, with_evidence
from dapcal.data import Labelled
from dapcal.distances import Space, Standardised, nearest
from dapcal.distances.standardised import LEAST
from dapcal.likelihoods import Categorical
from dapcal.metrics import auroc
from dapcal.models.table_fitting import fit
from dapcal.posteriors import ensemble
from dapcal.recipes import Recipe
from dapcal.tables.row_space import row_space

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")  # few rows choose, and of few errors


def rows(n: int, seed: int) -> Labelled:
    """Two numbers and one of six levels, some of them rare, (n, 2 + 6), and classes."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.tensor([0.4, 0.3, 0.15, 0.08, 0.05, 0.02])
    level = torch.multinomial(shares, n, replacement=True, generator=generator)
    x = torch.cat([torch.randn(n, 2, generator=generator), nn.functional.one_hot(level, 6).float()], 1)
    return Labelled(x, (x[:, 0] + 0.5 * torch.randn(n, generator=generator) > 0).long())


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


def calibrated_of(train: Labelled, held_out: Labelled) -> dapcal.Calibrated:
    posterior = ensemble.fit(make, Categorical(), train, members=2, epochs=1, batch_size=64)
    return dapcal.calibrate(posterior, train=train, held_out=held_out, candidates=4)


@pytest.fixture(scope="module")
def train() -> Labelled:
    return rows(120, 0)


@pytest.fixture(scope="module")
def held_out() -> Labelled:
    return rows(80, 1)


@pytest.fixture(scope="module")
def plain(train: Labelled, held_out: Labelled) -> dapcal.Calibrated:
    return calibrated_of(train, held_out)


def test_inputs_that_vary_alike(train: Labelled):
    projector = Standardised().fit_projector(train.x, None)
    varies = train.x.double().numpy().std(0)
    np.testing.assert_allclose(projector(train.x), train.x.numpy() / np.maximum(varies, LEAST), rtol=1e-5)
    constant = torch.ones(20, 3)
    assert torch.equal(Standardised().fit_projector(constant, None)(constant), constant / LEAST)


def test_the_rows_that_choose_are_compared_with(plain, train: Labelled, held_out: Labelled):
    """The distance is the shorter of those to training rows and to rows that choose; scales are of the former."""
    found = with_evidence(plain, train, held_out, (row_space(),)).evidence
    (space,) = found.further[-1:]
    scale = train.x.double().std(0, correction=0).clamp_min(LEAST)
    chose, judge, new = held_out.x[plain.chooses], held_out.x[plain.judges], rows(50, 2).x

    def to(x: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x.double() / scale, others.double() / scale).amin(1)

    for x in (judge, new):
        expected = torch.minimum(to(x, train.x), to(x, chose))
        torch.testing.assert_close(space.raw(x).double(), expected, rtol=1e-4, atol=1e-5)
    assert not space.raw(chose).any()
    reach = to(chose, train.x)
    median = reach.sort().values[(len(reach) - 1) // 2]
    assert float(found.center[-1]) == pytest.approx(float(median), rel=1e-4)
    assert float(found.scale[-1]) == pytest.approx(float(reach.quantile(0.95) - median), rel=1e-4)


def test_the_nearest_rows_count_three_times(plain, train: Labelled, held_out: Labelled):
    more = with_evidence(plain, train, held_out, (row_space(),))
    x = rows(50, 2).x
    total = (plain(x).ood_score.double() - more.evidence.sum_center) / more.evidence.sum_scale
    z = more(x).evidence["standardised inputs"].standardised
    assert NEAREST == 3
    expected = (10**total + 3 * 10 ** z.double()).log10()
    torch.testing.assert_close(more(x).ood_score.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(deploy.module(more)(x).ood_score, more(x).ood_score, rtol=1e-5, atol=1e-5)
    assert torch.equal(more(x).mean, plain(x).mean)


def test_it_is_saved(plain, train: Labelled, held_out: Labelled, tmp_path):
    more, x = with_evidence(plain, train, held_out, (row_space(),)), rows(50, 2).x
    more.save(tmp_path / "a.dap")
    assert torch.equal(dapcal.load(tmp_path / "a.dap", make())(x).ood_score, more(x).ood_score)


def test_some_of_the_rows_are_kept(plain, train: Labelled, held_out: Labelled):
    (space,) = with_evidence(plain, train, held_out, (row_space(points=30),)).evidence.further[-1:]
    assert len(space.metric.index.index.points) == 30


def test_nearest_rows_that_are_all_as_far_say_nothing(plain, train: Labelled, held_out: Labelled):
    twins = train._replace(x=torch.cat([train.x, held_out.x]), y=torch.cat([train.y, held_out.y]))
    assert with_evidence(plain, twins, held_out, (row_space(),)) is plain


def test_rows_that_judge_are_not_compared_with(plain, train: Labelled, held_out: Labelled):
    x = held_out.x.clone()
    x[plain.judges] += 3
    space = Space(Standardised(), partial(nearest), radius=None)
    one, two = (with_evidence(plain, train, held_out._replace(x=given), (space,)).evidence for given in (held_out.x, x))
    assert torch.equal(one.further[-1].metric.index.points, two.further[-1].metric.index.points)
    assert torch.equal(one.center, two.center)
    assert torch.equal(one.scale, two.scale)


def test_p_values_hold():
    """P(p <= a) <= a over refits, though new rows are compared with those that choose."""
    flagged: dict[float, list[float]] = {0.05: [], 0.2: [], 0.5: []}
    for seed in range(25):
        train, held_out, new = (rows(n, 1000 + 3 * seed + i) for i, n in enumerate((60, 40, 200)))
        model = with_evidence(calibrated_of(train, held_out), train, held_out, (row_space(),))
        p_value = model(new.x).ood_p_value
        for level, shares in flagged.items():
            shares.append(float((p_value <= level).double().mean()))
    for level, shares in flagged.items():
        assert np.mean(shares) <= level + 2.5 * np.std(shares, ddof=1) / math.sqrt(len(shares))


def test_a_level_that_training_never_saw_with_its_kind_is_found():
    """Rows of a rare level that stand where its training rows do not: a plain 0 or 1 hardly counts beside numbers."""
    generator = np.random.default_rng(0)
    level = generator.choice(["a", "b", "c"], 600, p=[0.6, 0.35, 0.05])
    numbers = generator.normal(size=(600, 6))
    numbers[:, 0] += np.where(level == "c", 3, 0)
    columns = {f"x{place}": numbers[:, place] for place in range(6)}
    table = pa.table({**columns, "level": level, "y": numbers[:, 1] + generator.normal(size=600)})
    strange = generator.normal(size=(200, 6))
    new = pa.table({**{f"x{place}": strange[:, place] for place in range(6)}, "level": ["c"] * 200})
    recipe = Recipe(fast=True, members=2, epochs=3, trees=False, refit=False)
    model = fit(table.slice(0, 500), "y", recipe=recipe)
    ordinary = table.slice(500)
    pieces = [model.calibrated.predict(model.encoder(some).x).evidence for some in (new, ordinary)]
    by = {name: auroc(*(piece[name].standardised for piece in pieces)) for name in pieces[0]}
    assert by["standardised inputs"] > 0.8
    if "inputs" in by:
        assert by["standardised inputs"] > by["inputs"]
