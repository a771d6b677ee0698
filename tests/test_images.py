"""The image experiments on made-up pictures: every row, what is remembered, and what is read back."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cases import coarsely
from dapcal import calibrate
from dapcal.distances import FittedSpace
from dapcal.experiments.images import bench as image_bench
from dapcal.experiments.images import measurement
from dapcal.experiments.images import methods as image_methods
from dapcal.experiments.images import run as image_run
from dapcal.experiments.images.bench import Bench, ImageTask
from dapcal.experiments.images.methods import PARTS, Answer, Fitted, Method, doubt, methods
from dapcal.experiments.images.run import run_task
from dapcal.experiments.images.tasks import FASHION_MNIST, MNIST, lenet, mlp
from dapcal.experiments.records import Outcome, Run
from dapcal.ranks import auroc
from image_cases import TASK, convolutions, noise

pytestmark = [
    pytest.mark.filterwarnings("ignore::dapcal.types.DapcalWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
TASKS = {name: replace(TASK, network=network) for name, network in (("mlp", mlp), ("convolutions", convolutions))}
WANTED = {"mlp": PARTS, "convolutions": [part for part in PARTS if part != "paper"]}  # whose rows another test has


class Finished(NamedTuple):
    """A run of all rows under one seed."""

    task: ImageTask
    work: Path
    outcome: Outcome
    said: list[str]

    @property
    def rows(self) -> dict:
        return self.outcome.numbers["runs"][0]["rows"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    @cache
    def run(name: str) -> Finished:
        work, said = tmp_path_factory.mktemp(name), []
        with coarsely():
            outcome = run_task("blobs", TASKS[name], Run(work, seeds=1, parts=tuple(WANTED[name]), say=said.append))
        return Finished(TASKS[name], work, outcome, said)

    return run


@pytest.fixture
def bench(finished: Callable[[str], Finished]) -> Bench:
    """A new one, whose networks are read from their checkpoints."""
    return Bench(TASKS["mlp"], 0, finished("mlp").work / "seed-0", "cpu")


# Rows


@pytest.mark.parametrize("network", TASKS)
def test_every_row_is_made_and_measured(finished, network):
    task, _, outcome, said = finished(network)
    rows = outcome.numbers["runs"][0]["rows"]
    assert list(rows) == [name for name, method in methods(task.outside).items() if method.part in WANTED[network]]
    assert len(said) == len(rows)
    for name, row in rows.items():
        main = outcome.numbers["main_scores"][name]
        assert set(row["ood"][main]) == {"noise", "flat"}, name
        for found in row["ood"].values():
            for detection in found.values():
                assert all(0 <= value <= 1 for value in detection.values())
        if name.startswith(("DAP", "DE +")):
            assert torch.isfinite(torch.tensor(row["facts"]["phi"]))
    json.dumps(outcome.numbers, allow_nan=False)
    if network == "mlp":
        assert rows["VI"]["test"]["accuracy"] == rows["DAP, ours"]["test"]["accuracy"]
        assert set(rows["DAP, paper's"]["weights"]) == {"test", "noise", "flat"}
    assert "curves" in rows["DAP, ours"]
    assert "curves" not in rows["energy"]


def test_the_papers_rows_with_the_network_of_fashion_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    few = partial(image_methods.odin.fit, epsilons=image_methods.odin.EPSILONS[::15])
    monkeypatch.setattr(image_methods.odin, "fit", few)
    with coarsely():
        outcome = run_task("blobs", replace(TASK, network=lenet, epochs=2), Run(tmp_path, seeds=1, parts=("paper",)))
    rows = outcome.numbers["runs"][0]["rows"]
    assert list(rows) == [name for name, method in methods(TASK.outside).items() if method.part == "paper"]
    assert rows["DAP, paper's"]["facts"]["notes"][-1].startswith("calibrated on ")


def test_a_row_does_not_depend_on_those_before_it(finished):
    """The last first, each on a bench of its own: so an interrupted run may go on at any row."""
    task, folder, _, _ = finished("mlp")
    work = folder / "seed-0"
    for name in reversed(methods(task.outside)):
        with coarsely():
            again = image_run._row(name, Bench(task, 0, work, "cpu"))
        kept = json.loads(image_run.row_path(work, name).read_text(encoding="utf-8"))
        del again["seconds"], kept["seconds"], kept["row"]
        assert json.loads(json.dumps(again)) == kept, name


@pytest.mark.parametrize("task", [MNIST, FASHION_MNIST, TASK], ids=lambda task: task.inside)
def test_rows_have_a_known_part_and_a_file_of_their_own(task: ImageTask):
    rows = methods(task.outside)
    assert {method.part for method in rows.values()} == set(PARTS)
    files = {image_run.row_path(Path(), name) for name in rows}
    assert len(files) == len(rows)
    assert set(image_run.DRAWN) <= set(rows)


@pytest.mark.parametrize("row", ["DAP, ours", "VI", "DDU"])
def test_detection_is_that_of_the_scores(finished, bench: Bench, row: str):
    with coarsely():
        fitted = methods(bench.task.outside)[row].fit(bench)
    with torch.no_grad():
        inside = fitted.answer(bench.test[0]).scores
        outside = {name: fitted.answer(x).scores for name, x in bench.outside.items()}
    stored = finished("mlp").rows[row]["ood"]
    assert set(stored) == set(inside)
    for score, near in inside.items():
        for name, scores in outside.items():
            far, found = scores[score], stored[score][name]
            assert found["auroc"] == pytest.approx(auroc(far, near), abs=1e-6), (score, name)
            flagged = [float((near >= t).double().mean()) for t in far if (far >= t).double().mean() >= 0.95]
            assert found["fpr95"] == pytest.approx(min(flagged), abs=1e-6), (score, name)


def test_what_is_measured_does_not_depend_on_the_batches(bench: Bench, monkeypatch):
    fitted = methods(bench.task.outside)["VI"].fit(bench)
    with torch.no_grad():
        whole = measurement.measured(fitted, bench, curves=False)
        monkeypatch.setattr(measurement, "BATCH", 32)
        assert measurement.measured(fitted, bench, curves=False)["ood"] == whole["ood"]


# Doubt


def test_doubt_is_the_order_of_one_minus_the_largest_probability(generator):
    log_probs = torch.randn(500, 10, generator=generator, dtype=torch.float64).mul(3).log_softmax(-1)
    torch.testing.assert_close(doubt(log_probs), -log_probs.max(-1).values, rtol=0, atol=1e-12)
    assert torch.equal(doubt(log_probs).argsort(), (1 - log_probs.max(-1).values.exp()).argsort())


def test_doubt_has_no_ties_where_probabilities_are_one():
    gaps = torch.linspace(37.5, 300, 200, dtype=torch.float64)
    log_probs = torch.stack([gaps, torch.zeros_like(gaps), -gaps], -1).log_softmax(-1)
    assert (log_probs.max(-1).values.exp() == 1).all()  # so they would tie
    assert (doubt(log_probs).diff() < 0).all()


def test_doubt_of_what_does_not_sum_to_one_is_minus_the_largest_log_probability(generator):
    totals = torch.randn(100, 1, generator=generator, dtype=torch.float64) * 200
    log_probs = torch.randn(100, 10, generator=generator, dtype=torch.float64).log_softmax(-1) + totals
    assert torch.equal(doubt(log_probs), -log_probs.max(-1).values)
    assert torch.equal(doubt(torch.full((3, 10), -torch.inf).double()), torch.full((3,), torch.inf).double())


def test_confident_networks_leave_no_ties_in_the_rows(bench: Bench):
    """Networks answer in single precision; the rows do not."""
    model = bench.map.network
    with torch.no_grad():
        model[-1].weight *= 40
        scores = image_methods.posterior_alone(bench.map).answer(bench.test[0]).scores["confidence"]
    assert len(scores.unique()) == len(scores)


# What is remembered


@pytest.mark.parametrize("posterior", ["variational", "ensemble"])
def test_our_row_is_calibrate_with_all_defaults(bench: Bench, posterior: str):
    """Bit for bit, the first time and when distances are remembered, beside another posterior's distances."""
    row = {"variational": "DAP, ours", "ensemble": "DE + DAP, ours"}[posterior]
    rows = methods(bench.task.outside)
    fitted, others = rows[row].fit(bench), rows["DAP, ours" if posterior == "ensemble" else "DE + DAP, ours"].fit(bench)
    plain = calibrate(getattr(bench, posterior), train=bench.train, held_out=bench.held_out)
    expected = image_methods.adjusted(plain)
    assert fitted.facts == expected.facts
    with torch.no_grad():
        for images in (bench.test[0], *bench.outside.values()):
            for x in (images, *images.split(32), images[7:31], images.clone()):
                others.answer(x)
                for _ in range(2):
                    ours, theirs = fitted.answer(x), expected.answer(x)
                    assert ours.scores.keys() == theirs.scores.keys()
                    for name, score in theirs.scores.items():
                        assert torch.equal(ours.scores[name], score), name
                    assert torch.equal(ours.log_probs, theirs.log_probs)


def plainly(space: FittedSpace, x: Tensor) -> Tensor:
    return FittedSpace(space.name, space.projector, space.metric, space.radius).raw(x)


def test_distances_are_computed_once(bench: Bench, monkeypatch):
    spaces = bench.measured(bench.variational).distance.spaces
    first = [space.raw(bench.test[0]) for space in spaces]
    again = [space.raw(bench.test[0]) for space in spaces]
    assert all(one is two for one, two in zip(first, again, strict=True))
    inputs = [m.distance.spaces[-1].raw(bench.test[0]) for m in map(bench.measured, (bench.variational, bench.map))]
    assert inputs[0] is inputs[1], "distances between inputs depend on no network"


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.clone().mul_(0.5),
        lambda x: x.flip(0),
        lambda x: x[::2],  # begins where x[:50] does, and has its length
        lambda x: x[:50].transpose(2, 3),
        lambda x: x[1:51],
        lambda x: x[:1].expand(50, -1, -1, -1),
    ],
    ids=["other values", "another order", "every second", "transposed", "shifted", "repeated"],
)
def test_other_images_have_their_own_distance(bench: Bench, other: Callable[[Tensor], Tensor]):
    x = bench.test[0]
    for space in bench.measured(bench.variational).distance.spaces:
        space.raw(x), space.raw(x[:50])
        assert torch.equal(space.raw(other(x)), plainly(space, other(x)))


def test_images_at_the_address_of_others_have_their_own_distance(bench: Bench):
    spaces = bench.measured(bench.variational).distance.spaces
    addresses = []
    for seed in range(8):
        x = torch.rand(bench.test[0].shape, generator=torch.Generator().manual_seed(seed))
        addresses.append(x.data_ptr())
        for space in spaces:
            assert torch.equal(space.raw(x), plainly(space, x))
        del x
    assert len(set(addresses)) < len(addresses), "freed memory is used again"


def test_images_that_are_known_by_their_address_keep_it(bench: Bench):
    """A distance that outlives its bench must not take new images for old ones."""
    spaces = bench.measured(bench.variational).distance.spaces
    images = [weakref.ref(x) for x in (bench.test[0], *bench.outside.values())]
    bench.__dict__.clear()
    gc.collect()
    assert all(image() is not None for image in images)
    del spaces
    gc.collect()
    assert all(image() is None for image in images)


# Which rows, and which seeds


class Counted:
    """A method that counts how often it is fitted."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def __call__(self, bench: Bench) -> Fitted:
        self.seeds.append(bench.seed)
        return Fitted(lambda x: Answer({"score": x.mean((1, 2, 3))}))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counted]:
    found = {part: Counted() for part in PARTS}
    monkeypatch.setattr(image_run, "methods", lambda _: {f"the {p}": Method(p, c, "score") for p, c in found.items()})
    return found


def test_finished_rows_are_read_back(counted, tmp_path: Path):
    first = run_task("blobs", TASK, Run(tmp_path, seeds=2)).numbers
    assert all(c.seeds == ([0] if part == "trained" else [0, 1]) for part, c in counted.items())
    (tmp_path / "seed-1" / "row-the-newer.json").unlink()
    said: list[str] = []
    steps: list[tuple[str, int, int]] = []
    second = run_task("blobs", TASK, Run(tmp_path, seeds=2, say=said.append, progress=lambda *s: steps.append(s)))
    assert counted["newer"].seeds == [0, 1, 1]
    assert sum(len(c.seeds) for c in counted.values()) == 2 * len(PARTS)
    assert len(said) == len(set(said)) == 2 * len(PARTS) - 1
    assert "blobs, seed-1: the newer" in said
    assert steps[-1] == ("methods and seeds", 2 * len(PARTS) - 1, 2 * len(PARTS) - 1)
    assert without_seconds(second.numbers) == without_seconds(first)


def without_seconds(numbers: dict) -> dict:
    numbers = json.loads(json.dumps(numbers))
    for run in numbers["runs"]:
        for row in run["rows"].values():
            del row["seconds"]
    return numbers


def test_parts_choose_rows(counted, tmp_path: Path):
    numbers = run_task("blobs", TASK, Run(tmp_path, seeds=1, parts=("oracle", "paper"))).numbers
    assert list(numbers["runs"][0]["rows"]) == ["the paper", "the oracle"], "in the table's order"


@pytest.mark.parametrize("full", [False, True])
def test_all_seeds_have_trained_rows_only_where_all_is_wanted(counted, tmp_path: Path, full: bool):
    numbers = run_task("blobs", TASK, Run(tmp_path, seed=3, seeds=3, full=full, parts=("trained", "paper"))).numbers
    assert numbers["seeds"] == [run["seed"] for run in numbers["runs"]] == [3, 4, 5]
    assert counted["paper"].seeds == [3, 4, 5]
    assert counted["trained"].seeds == ([3, 4, 5] if full else [3])
    assert ["the trained" in run["rows"] for run in numbers["runs"]] == [True, full, full]


def test_five_seeds_unless_told_otherwise(counted, tmp_path: Path):
    assert run_task("blobs", TASK, Run(tmp_path, parts=("paper",))).numbers["seeds"] == [0, 1, 2, 3, 4]


def test_unknown_parts_are_named_before_anything_is_done(tmp_path: Path):
    with pytest.raises(ValueError, match=r"Expected parts among paper, ours, .*trained, got mine, theirs"):
        run_task("blobs", TASK, Run(tmp_path, parts=("theirs", "paper", "mine")))
    assert not list(tmp_path.iterdir())


def test_missing_data_are_missed_before_anything_is_trained(tmp_path: Path, monkeypatch):
    def missing() -> Tensor:
        raise FileNotFoundError("flat.gz is nowhere")

    monkeypatch.setattr(image_bench, "OUTSIDE", {"noise": noise, "flat": missing})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run_task("blobs", TASK, Run(tmp_path, seeds=1))
    assert not list(tmp_path.iterdir())


def test_seeds_differ_in_data_networks_and_draws(tmp_path: Path):
    one, other = (Bench(TASK, seed, tmp_path / str(seed), "cpu") for seed in (0, 1))
    assert not torch.equal(one.held_out[0], other.held_out[0])
    pooled = [torch.cat([b.train[0], b.held_out[0]]).flatten(1).sum(1).sort().values for b in (one, other)]
    assert torch.equal(*pooled), "the same pictures, split differently"
    weights = [b.network(s)[1].weight for b in (one, other) for s in (b.seed * 2, b.seed * 2 + 1)]
    assert len({w.sum().item() for w in weights}) == 4, "no member of one seed is a member of another"
