"""Indexes that are not exact: their distances are those of training points, never too small, and told how good."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import dapcal
from cases import inputs, network_posterior
from dapcal import blocks, container, trying
from dapcal.distances import HNSW, IVF, Coreset, OnDisk, ProductQuantised, Space, TorchIndex, faiss_search, nearest
from dapcal.distances import metrics as metrics_module
from dapcal.distances.coresets import herding, k_center
from dapcal.distances.projectors import Identity
from dapcal.in_file import InFile
from dapcal.likelihoods import Categorical
from dapcal.moving import moved

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")

RECIPES = {
    "lists": IVF(lists=12),
    "few lists": IVF(lists=12, probes=1),
    "graph": HNSW(links=8),
    "codes": ProductQuantised(pieces=2, lists=6, candidates=20),
    "codes of pieces that do not divide": ProductQuantised(pieces=3, lists=6),
    "k-center": Coreset(60),
    "herding": Coreset(60, "herding"),
    "all points kept": Coreset(1000),
}
POINTS = 400


@pytest.fixture
def train(generator):
    clusters = 4 * torch.randn(5, 4, generator=generator)
    return clusters[torch.arange(POINTS) % 5] + torch.randn(POINTS, 4, generator=generator)


@pytest.fixture
def queries(generator, train):
    return torch.cat([train[:20], train[20:60] + torch.randn(40, 4, generator=generator)])


@pytest.fixture(params=RECIPES)
def index(request, train):
    return RECIPES[request.param](train)


@pytest.mark.parametrize("k", [1, 3, 50])
def test_distances_are_true_and_never_too_small(index, train, queries, k):
    distances, indices = index.query(queries, k)
    exact = TorchIndex(train).query(queries, k)[0]
    assert distances.shape == indices.shape == (len(queries), k)
    assert torch.equal(distances, torch.stack([(queries - train[i]).norm(dim=1) for i in indices.T], 1))
    assert (distances >= exact).all()
    assert (distances.diff(dim=1) >= 0).all()
    assert all(len(set(row)) == k for row in indices.tolist())


def test_any_batches_give_the_same(index, queries):
    together = index.query(queries, 2)
    apart = [index.query(part, 2) for part in queries.split(7)]
    for i in range(2):
        assert torch.equal(together[i], torch.cat([found[i] for found in apart]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda i: pickle.loads(pickle.dumps(i)), lambda i: moved(i, "cpu")])
def test_copies_answer_alike(index, queries, copied):
    expected = index.query(queries, 2)
    assert all(map(torch.equal, copied(index).query(queries, 2), expected))


@pytest.mark.parametrize("recipe", RECIPES.values())
def test_fitting_again_gives_the_same(recipe, train, queries):
    one, two = (recipe(train.clone()) for _ in range(2))
    assert all(map(torch.equal, one.query(queries, 2), two.query(queries, 2)))
    assert one.quality == two.quality


def test_quality_is_that_of_the_nearest_other_point(train):
    index = IVF(lists=12, probes=1)(train)
    found, exact = index.query(train, 2)[0][:, 1], TorchIndex(train).query(train, 2)[0][:, 1]
    assert index.quality.sample == POINTS
    assert index.quality.recall == pytest.approx(float((found == exact).double().mean()))
    assert index.quality.recall < 1
    assert index.quality.excess == pytest.approx(np.quantile((found / exact - 1).double(), 0.99), rel=1e-4)
    assert index.quality.largest == pytest.approx(float((found / exact - 1).max()), rel=1e-4)
    assert f"1 of 12 lists searched: recall {index.quality.recall:.3f} on {POINTS} training points" in index.note


def test_coresets_are_judged_by_points_that_are_not_kept(train):
    index = Coreset(60)(train)
    others = torch.ones(POINTS, dtype=torch.bool).index_fill_(0, index.rows, False)
    found = index.query(train[others], 1)[0][:, 0]
    exact = TorchIndex(train).query(train[others], 2)[0][:, 1]
    assert index.quality.sample == POINTS - 60
    assert index.quality.typical == pytest.approx(float((found / exact - 1).clamp_min(0).median()), rel=1e-4)
    assert index.note.startswith("60 of 400 training points are kept: recall")


@pytest.mark.parametrize(
    ("recipe", "least"), [(IVF(lists=40), IVF(lists=40, probes=1)), (HNSW(links=2), HNSW(links=2, breadth=1))]
)
def test_as_much_is_searched_as_the_recall_takes(recipe, least, train):
    asked = least(train).quality.recall + 0.02  # how much the least finds differs by the version of faiss
    assert asked < 1
    assert replace(recipe, recall=asked)(train).quality.recall >= asked


def test_all_lists_are_exact_search(train, queries):
    found = IVF(lists=12, probes=12)(train).query(queries, 5)
    assert all(map(torch.equal, found, TorchIndex(train).query(queries, 5)))


def test_training_points_are_at_zero_in_their_lists(train):
    distances, indices = IVF(lists=12, probes=1)(train).query(train, 1)
    assert not distances.any()
    assert torch.equal(indices[:, 0], torch.arange(POINTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_disk_is_as_in_memory(tmp_path, train, queries, dtype):
    train, queries = train.to(dtype), queries.to(dtype)
    lists, path = IVF(lists=12, probes=3), tmp_path / "points"
    mapped, own = OnDisk(path, lists)(train), lists(train)
    assert path.stat().st_size == train.nbytes
    assert all(map(torch.equal, mapped.query(queries, 3), own.query(queries, 3)))
    assert mapped.note == own.note


def test_k_center_takes_the_farthest_each_time(train):
    rows = k_center(train.double(), 10, torch.Generator()).tolist()
    for count in range(1, 10):
        to_taken = torch.cdist(train.double(), train[rows[:count]].double()).min(1).values
        assert to_taken[rows[count]] == pytest.approx(float(to_taken.max()))


def test_herding_keeps_the_mean_better_than_chance(train, generator):
    kept = herding(train, 40, torch.Generator().manual_seed(0))
    off = (train[kept].mean(0) - train.mean(0)).norm()
    drawn = [train[torch.randperm(POINTS, generator=generator)[:40]].mean(0) - train.mean(0) for _ in range(20)]
    assert off < min(float(one.norm()) for one in drawn)
    assert len(set(kept.tolist())) == 40


def test_coresets_of_many_points_are_chosen_among_a_sample(train):
    index = Coreset(10, sample=50)(train)
    assert len(index.rows) == 10
    assert index.total == POINTS


def test_many_points_are_searched_approximately_by_themselves(train, monkeypatch):
    monkeypatch.setattr(metrics_module, "MOST_EXACT", POINTS - 1)
    assert "lists searched" in nearest(train).index.note
    assert isinstance(nearest(train, index=TorchIndex).index, TorchIndex)
    monkeypatch.setattr(metrics_module, "MOST_EXACT", POINTS)
    assert isinstance(nearest(train).index, TorchIndex)


@pytest.mark.parametrize("stays", [True, False])  # whether points stay in their file
@pytest.mark.parametrize("recipe", RECIPES)
def test_calibration_and_prediction_ask_the_same_index(generator, recipe, stays, tmp_path, monkeypatch):
    """So p-values are valid: they compare distances that were found in one way. The note tells what was found."""
    posterior, x, y = network_posterior(Categorical(), 3), inputs(600), torch.arange(600) % 3
    x = torch.randn(x.shape, generator=generator)
    space = Space(Identity(), partial(nearest, index=RECIPES[recipe]), name="inputs")
    held_out = (x[300:], y[300:])
    calibrated = dapcal.calibrate(posterior, train=(x[:300], y[:300]), held_out=held_out, distance=space)
    assert any(note.startswith("inputs: ") and "no distance is too small" in note for note in calibrated.notes)
    judges = calibrated(held_out[0][calibrated.judges])
    assert torch.equal(judges.ood_score.sort().values, calibrated.evidence.held_out.float())
    ranks = torch.arange(1, 151) / 151  # every judging input has a p-value of its own, so their share is exact
    assert (judges.ood_p_value.sort().values >= ranks - 1e-12).all()
    if stays:
        monkeypatch.setattr(container, "LARGE", 1)
        monkeypatch.setattr(blocks, "BLOCK", 64)
        monkeypatch.setattr(trying, "_ROWS", 2)
    calibrated.save(tmp_path / "model.dap")
    loaded = dapcal.load(tmp_path / "model.dap", posterior.model)
    assert torch.equal(loaded(x).ood_p_value, calibrated(x).ood_p_value)
    assert torch.equal(loaded(x).distance, calibrated(x).distance)


def test_of_a_file_only_the_lists_that_are_searched_are_read(generator, tmp_path, monkeypatch):
    monkeypatch.setattr(container, "LARGE", 1)
    monkeypatch.setattr(blocks, "BLOCK", 64)
    posterior, y = network_posterior(Categorical(), 3), torch.arange(300) % 3
    x = torch.randn(300, inputs(1).shape[1], generator=generator)
    space = Space(Identity(), partial(nearest, index=IVF(lists=20, probes=1)))
    held_out = (x + 0.1 * torch.randn(x.shape, generator=generator), y)
    dapcal.calibrate(posterior, train=(x, y), held_out=held_out, distance=space).save(tmp_path / "model.dap")
    index = dapcal.load(tmp_path / "model.dap", posterior.model).distance.spaces[0].metric.index
    assert isinstance(index.points, InFile)
    read, total = index.points._blocks._whole, -(-x.nbytes // 64)
    assert 0 < len(read) < total / 4  # by the prediction that tries the file
    index.query(x, 1)
    assert len(read) == total


def test_a_walk_keeps_no_more_points_in_view_than_there_are(train, queries):
    """A file may ask for any number, for which faiss would take memory at once."""
    graph = replace(HNSW(links=8)(train), breadth=2**31 - 1)
    assert torch.equal(graph.query(queries, 3)[0], TorchIndex(train).query(queries, 3)[0])


@pytest.mark.parametrize("recipe", [HNSW(), ProductQuantised()])
def test_without_faiss_there_is_one_sentence(train, recipe, monkeypatch):
    index = recipe(train)
    monkeypatch.setattr(faiss_search, "library", lambda: None)
    for ask in (lambda: recipe(train), lambda: copy.deepcopy(index).query(train[:1], 1)):
        with pytest.raises(ImportError, match=r"needs faiss: pip install 'dapcal\[fast\]', or use IVF\(\)"):
            ask()


DAMAGES = {
    "a link out of the graph": ("graph", lambda i: {"links": i.links.index_fill(0, torch.tensor([0]), POINTS)}),
    "a link to a level where a point is not": (
        "graph",
        lambda i: {"levels": i.levels.index_fill(0, i.links[i.links >= 0][:1], 0)},
    ),
    "an entry that is not there": ("graph", lambda i: {"entry": POINTS}),
    "links of another length": ("graph", lambda i: {"links": i.links[:-1]}),
    "points of another number": ("lists", lambda i: {"points": i.points[:-1]}),
    "more probes than lists": ("lists", lambda i: {"probes": 13}),
    "a list that starts outside": ("lists", lambda i: {"lists": replace(i.lists, starts=i.lists.starts + 1)}),
    "a point twice": ("lists", lambda i: {"lists": replace(i.lists, order=torch.zeros_like(i.lists.order))}),
    "codes of another number": ("codes", lambda i: {"codes": i.codes[:-1]}),
    "books of another width": ("codes", lambda i: {"books": i.books[:, :, :-1]}),
    "rows out of range": ("k-center", lambda i: {"rows": i.rows + POINTS}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_damaged_file_may_hold_is_refused(train, damage):
    kind, changed = DAMAGES[damage]
    index = RECIPES[kind](train)
    with pytest.raises(ValueError, match="Expected"):
        replace(index, **changed(index))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IVF(lists=0), "`lists` >= 1 or None, got 0"),
        (lambda: IVF(recall=1.5), "`recall` above 0 and at most 1, got 1.5"),
        (lambda: ProductQuantised(probes=0), "`probes` >= 1 or None, got 0"),
        (lambda: ProductQuantised(pieces=0), "`pieces` >= 1 or None, got 0"),
        (lambda: ProductQuantised(candidates=0), "`candidates` >= 1, got 0"),
        (lambda: ProductQuantised()(torch.zeros(5, 2)), "at least 256 training points for codes, got 5"),
        (lambda: HNSW(links=1), "`links` >= 2, got 1"),
        (lambda: HNSW(recall=0), "`recall` above 0 and at most 1, got 0"),
        (lambda: HNSW(breadth=0), "`breadth` >= 1 or None, got 0"),
        (lambda: Coreset(0), r"`size` between 1 and `sample` \(100000\), got 0"),
        (lambda: Coreset(5, "centre"), r"`method` as one of \['herding', 'k-center'\], got 'centre'"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("k", [0, POINTS + 1])
def test_k_out_of_range(index, queries, k):
    with pytest.raises(ValueError, match=f"`k` between 1 and .*, got {k}"):
        index.query(queries, k)


@pytest.mark.parametrize("recipe", [IVF(), HNSW(), Coreset(3)])
def test_one_point(recipe):
    assert recipe(torch.ones(1, 2)).query(torch.tensor([[4.0, 5.0]]), 1)[0] == 5
