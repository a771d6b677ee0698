"""The CIFAR-10 experiment on made-up photographs: every row, units that are gone on with, what is kept, its page."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cases import coarsely
from dapcal import calibrate
from dapcal.calibration import weighing
from dapcal.cli import app
from dapcal.detectors import knn, vim
from dapcal.distances import choosing, outliers, verdicts
from dapcal.distances.neighbors import TorchIndex
from dapcal.experiments import EXPERIMENTS
from dapcal.experiments.cifar import run as cifar_run
from dapcal.experiments.cifar.bench import PhotoBench
from dapcal.experiments.cifar.collapse import collapse_of
from dapcal.experiments.cifar.networks import WideResNet, augmented, small_resnet, wide_resnet, with_squares
from dapcal.experiments.cifar.pictures import Photographs, corruptions, photographs, textures
from dapcal.experiments.cifar.rows import ONE, chosen, table, units
from dapcal.experiments.cifar.task import plan, task_for
from dapcal.experiments.cifar.training import Clock, OutOfTime, train
from dapcal.experiments.images.methods import PARTS
from dapcal.experiments.images.run import row_path
from dapcal.experiments.page.results import results_page
from dapcal.experiments.published import IMAGES
from dapcal.experiments.records import DEFAULTS, Outcome, Run
from dapcal.experiments.runner import run_and_write
from data_cases import Places
from photo_cases import TASK, miniature, put_photographs, same_weights

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.types.DapcalWarning")
TINY = EXPERIMENTS["cifar10"]._replace(run=lambda this: cifar_run.run_task("cifar10", TASK, this))


class Finished(NamedTuple):
    """A run of all units, its work folder kept."""

    folder: Path
    run: Run
    outcome: Outcome
    said: list[str]
    searched: set[torch.dtype]  # of points among which neighbours were looked for

    def again(self, folder: Path) -> Run:
        """The same run in a copy of its folders."""
        shutil.copytree(self.folder, folder)
        return replace(self.run, work=folder / "work", kept=folder / "kept", say=lambda _: None)

    def rows(self, seed: int) -> dict:
        return self.outcome.numbers["runs"][seed]["rows"]


@pytest.fixture(scope="module", autouse=True)
def _made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files of photographs, and networks in bfloat16 as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        put_photographs(Places(tmp_path_factory.mktemp("data"), patch))
        patch.setattr(WideResNet, "halved", ("cpu",))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder, said, searched = tmp_path_factory.mktemp("finished"), [], set()
    run = Run(folder / "work", kept=folder / "kept", say=said.append)
    search = TorchIndex.query

    def counted(index: TorchIndex, points: torch.Tensor, *more: int):
        searched.update({index.points.dtype, points.dtype})
        return search(index, points, *more)

    with coarsely(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchIndex, "query", counted)
        outcome = cifar_run.run_task("cifar10", TASK, run)
    return Finished(folder, run, outcome, said, searched)


@pytest.fixture(scope="module")
def data() -> Photographs:
    return photographs(TASK, 0, "cpu")


# The result


def test_every_row_is_there_and_finite(finished: Finished):
    assert finished.outcome.unfinished == 0
    numbers = finished.outcome.numbers
    json.dumps(numbers, allow_nan=False)
    assert list(finished.rows(0)) == list(table())
    for run in numbers["runs"]:
        for name, row in run["rows"].items():
            assert set(row["ood"][numbers["main_scores"][name]]) == {"SVHN", "CIFAR-100", "textures", "corruptions"}
            assert all(0 <= v <= 1 for found in row["ood"].values() for one in found.values() for v in one.values())
            if "DAP" in name:
                assert isinstance(row["facts"]["phi"], float), name
    for score in ("nll", "accuracy", "ece"):
        assert all(isinstance(finished.rows(0)[row]["test"][score], float) for row in ("MAP", "DE", "VI", "SWAG", ONE))


def test_no_distance_is_measured_between_features_of_eight_bits(finished: Finished):
    assert finished.searched == {torch.float32}


def test_networks_are_the_seeds_of_one_network_and_the_members_of_the_ensemble(finished: Finished):
    assert finished.outcome.numbers["seeds"] == [0, 1]
    assert {"MAP", ONE, "ODIN", "energy"} <= set(finished.rows(1))
    assert not {"DE", "VI", "SWAG", "MAP, spectral"} & set(finished.rows(1)), (
        "one ensemble; dear rows of the first seed"
    )
    assert {path.name for path in (finished.folder / "work" / "weights").iterdir()} == {
        "network-0.safetensors", "network-1.safetensors", "spectral-0.safetensors",
    }  # fmt: skip


def test_the_result_says_how_it_was_made(finished: Finished):
    numbers = finished.outcome.numbers
    assert {"torch", "device", "defaults"} <= set(numbers["environment"])
    assert numbers["settings"]["rule"] == plan()["rule"]
    assert finished.rows(0)["VI"]["facts"]["kl_weight"] == TASK.kl_weight
    (record,) = numbers["runs"][1]["units"]["network"]
    assert set(record["training_seconds"]) == {"network-1"}, "what was trained for it, and nothing else"
    assert record["environment"] == numbers["environment"]
    assert set(finished.rows(0)["MAP"]["facts"]["collapse"]) == {"within", "dimensions", "far_stays_far"}


def test_scores_logits_and_features_are_kept(finished: Finished):
    folder = finished.folder / "kept" / "seed-0"
    with np.load(folder / "features.npz") as found:
        assert found["features of train"].shape == (20, 64)
        assert found["logits of SVHN"].shape == (30, 10)
        accuracy = (found["logits of test"].argmax(1) == found["labels of test"]).mean()
    assert accuracy == pytest.approx(finished.rows(0)["MAP"]["test"]["accuracy"], abs=1e-6)
    for row in table():
        with np.load(row_path(folder, row).with_suffix(".npz")) as found:
            assert {name: len(found[name]) for name in found.files} == {
                "test": 30, "SVHN": 30, "CIFAR-100": 30, "textures": 20, "corruptions": 20,
            }  # fmt: skip
            assert all(np.isfinite(found[name]).all() for name in found.files), row


# Units


def test_a_run_out_of_time_goes_on(finished: Finished, tmp_path: Path):
    said: list[str] = []
    stopped = cifar_run.run_task("cifar10", TASK, Run(tmp_path / "work", minutes=0, say=said.append))
    assert stopped.unfinished == sum(len(unit.rows) for unit in units(TASK, 0, full=False))
    assert said == ["cifar10: the minutes are over; the same command goes on"]
    again = cifar_run.run_task("cifar10", TASK, replace(finished.again(tmp_path / "copy"), minutes=0))
    assert again.numbers == finished.outcome.numbers, "all is read back, nothing needs time"


def test_an_unfinished_result_file_goes_on_on_another_machine(finished: Finished, tmp_path: Path):
    """Its work folder stayed behind."""
    half = finished.again(tmp_path / "half")
    lost = ("MAP", "fDBD")
    for row in lost:
        row_path(half.work / "seed-1", row).unlink()
    numbers = cifar_run.run_task("cifar10", TASK, replace(half, minutes=0)).numbers
    assert numbers["unfinished"] == [f"seed 1: {row}" for row in lost]
    (tmp_path / "cifar10.json").write_text(json.dumps(numbers), encoding="utf-8")
    said: list[str] = []
    run = Run(tmp_path / "work", kept=tmp_path / "cifar10", minutes=0, say=said.append)
    again = cifar_run.run_task("cifar10", TASK, run)
    assert said[0] == f"cifar10.json: {sum(len(one['rows']) for one in numbers['runs'])} rows taken over"
    assert again.numbers == numbers
    other = replace(TASK, epochs=4)
    assert len(cifar_run.run_task("cifar10", other, replace(run, work=tmp_path / "other")).numbers["unfinished"]) > 2
    (tmp_path / "cifar10.json").write_text(json.dumps(finished.outcome.numbers), encoding="utf-8")
    anew = cifar_run.run_task("cifar10", TASK, replace(run, work=tmp_path / "anew"))
    assert anew.unfinished > 2, "a finished one is made anew"


def test_a_killed_unit_is_repeated_alone(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = finished.again(tmp_path / "copy")
    weights = run.work / "weights"
    lost = ("kNN, features", "fDBD", "energy")
    for row in lost:
        row_path(run.work / "seed-1", row).unlink()
    (weights / "network-1.safetensors").unlink()
    trained: list[Path] = []
    plain_train, plain_row = train, cifar_run.make_row

    def counted(*arguments, **options):
        trained.append(options["checkpoint"])
        return plain_train(*arguments, **options)

    def killed(method, *arguments):
        if method is known["fDBD"]:
            raise KeyboardInterrupt
        return plain_row(method, *arguments)

    known = table()
    monkeypatch.setattr("dapcal.experiments.cifar.bench.train", counted)
    monkeypatch.setattr(cifar_run, "table", lambda: known)
    with monkeypatch.context() as patch:
        patch.setattr(cifar_run, "make_row", killed)
        with pytest.raises(KeyboardInterrupt):
            cifar_run.run_task("cifar10", TASK, run)
    assert [row_path(run.work / "seed-1", row).exists() for row in lost] == [True, False, True]
    again = cifar_run.run_task("cifar10", TASK, run).numbers
    assert [path.name for path in trained] == ["network-1.checkpoint"], "once, and no other"
    assert not list(weights.glob("*.checkpoint"))
    assert [len(again["runs"][seed]["units"]["network"]) for seed in (0, 1)] == [1, 3]
    for number, row in ((seed, row) for seed in (0, 1) for row in finished.rows(seed)):
        assert again["runs"][number]["rows"][row]["ood"] == finished.rows(number)[row]["ood"], row


def test_units_come_in_the_order_of_what_matters():
    several = [(unit.name, unit.seed) for unit in units(replace(TASK, members=3), 4, full=True)]
    dear = ["variational", "swag", "questions", "spectral"]
    assert several == [
        ("network", 4), ("network", 5), ("network", 6), ("ensemble", 4),
        *((name, 4) for name in dear), *((name, seed) for name in dear for seed in (5, 6)),
    ]  # fmt: skip
    assert [unit.name for unit in units(replace(TASK, members=1), 0, full=False)] == ["network", *dear]
    paper = chosen(units(TASK, 0, full=False), ("paper",))
    assert [unit.rows for unit in paper] == [("MAP", "DDU", "ODIN")] * 2 + [("DE",), ("VI", "DAP, paper's")]
    assert {method.part for method in table().values()} < set(PARTS)


def test_unknown_parts_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match="Expected parts among paper, ours, posteriors, newer, questions, got oracle"):
        cifar_run.run_task("cifar10", TASK, Run(tmp_path, parts=("oracle",)))


def test_the_command_stops_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(EXPERIMENTS, "cifar10", TINY)
    words = ["reproduce", "cifar10", "--minutes", "0", "--out", str(tmp_path), "--json"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["unfinished"] > 0
    assert json.loads((tmp_path / "cifar10.json").read_text(encoding="utf-8"))["unfinished"][0] == "seed 0: MAP"
    assert (tmp_path / "unfinished" / "cifar10" / "settings.json").exists()


def test_work_is_removed_when_all_is_done(finished: Finished, tmp_path: Path):
    assert run_and_write("cifar10", TINY, tmp_path, Run(tmp_path / "unfinished", minutes=0)).unfinished
    shutil.copytree(finished.folder / "work", tmp_path / "unfinished" / "cifar10", dirs_exist_ok=True)
    outcome = run_and_write("cifar10", TINY, tmp_path, Run(tmp_path / "unfinished"))
    assert outcome.unfinished == 0
    assert not (tmp_path / "unfinished").exists()


# Networks and training


def test_sizes_of_networks():
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in make(0.0).parameters()) for make in (wide_resnet, small_resnet)]
    assert sizes == [36_479_194, 77_850]
    with pytest.raises(ValueError, match="6n \\+ 4"):
        WideResNet(12, 1)


def test_augmented_images_are_shifted_and_flipped(generator):
    x = torch.rand(40, 3, 8, 8, generator=generator)
    wide = torch.nn.functional.pad(x, [4] * 4)
    for before, after in zip(wide, augmented(x), strict=True):
        views = [
            turned[:, down : down + 8, right : right + 8]
            for turned in (before, before.flip(2)) for down in range(9) for right in range(9)
        ]  # fmt: skip
        assert any(torch.equal(after, view) for view in views)
    assert not torch.equal(augmented(x), augmented(x))


def test_a_square_around_a_random_pixel_is_erased(generator):
    x = torch.rand(200, 3, 32, 32, generator=generator) + 1
    erased = with_squares(x, 8)
    gone = erased == 0
    assert torch.equal(gone[:, 0], gone[:, 2])
    assert torch.equal(erased[~gone], x[~gone])
    rows, columns = gone[:, 0].any(2).sum(1), gone[:, 0].any(1).sum(1)
    assert torch.equal(gone[:, 0].sum((1, 2)), rows * columns)  # each is one rectangle,
    assert rows.min() >= 4  # cut off at the margin at most,
    assert rows.max() == columns.max() == 8
    assert (rows == 8).double().mean() > 0.6


def test_images_are_augmented_in_training_alone(generator):
    network, x = WideResNet(10, 1, stride=4, erased=8).eval(), torch.rand(4, 3, 32, 32, generator=generator)
    assert torch.equal(network(x), network(x))
    network.train()
    assert not torch.equal(network(x), network(x))


def test_training_goes_on_where_it_was_stopped(data: Photographs, tmp_path: Path):
    how = {"epochs": 3, "batch_size": 40, "learning_rate": 0.1, "weight_decay": 5e-4, "seed": 3}
    torch.manual_seed(0)
    one, other = miniature(0.1), miniature(0.1)
    other.load_state_dict(one.state_dict())
    train(one, data.train, **how, checkpoint=tmp_path / "one")
    assert not (tmp_path / "one").exists()
    assert not one.training
    for _ in range(2):
        with pytest.raises(OutOfTime):
            train(other, data.train, **how, checkpoint=tmp_path / "other", clock=Clock.of(0))
        other = miniature(0.1)
    train(other, data.train, **how, checkpoint=tmp_path / "other", clock=Clock.of(None))
    assert same_weights(one, other)


def test_training_that_breaks_says_so(data: Photographs, tmp_path: Path):
    with pytest.raises(ValueError, match="no longer finite in epoch 1; lower"):
        train(
            miniature(0.0), data.train, epochs=1, batch_size=40, learning_rate=1e30, weight_decay=0.0, seed=0,
            checkpoint=tmp_path / "x",
        )  # fmt: skip


# Data and what is computed of them


def test_parts_of_the_data(data: Photographs):
    assert [len(x) for x, _ in (data.train, data.held_out, data.test)] == [160, 80, 30]
    everything = torch.cat([data.train[0], data.held_out[0]]).flatten(1)
    assert len(everything.unique(dim=0)) == 240, "no image is in two parts"
    again = photographs(TASK, 0, "cpu")
    assert all(torch.equal(data.outside[name], again.outside[name]) for name in TASK.outside)


@pytest.mark.parametrize("make", [lambda x, seed: textures(len(x), seed), corruptions])
def test_images_of_our_own_making(data: Photographs, make):
    x = data.test[0]
    made, other = make(x, 0), make(x, 1)
    assert made.shape == x.shape
    assert not torch.equal(made, other)
    assert torch.equal(made, (255 * made).round() / 255)
    assert made.min() >= 0
    assert made.max() <= 1
    assert (made != x).flatten(1).any(1).all()


def test_detectors_of_features_see_what_they_see_of_images(finished: Finished, data: Photographs):
    bench = PhotoBench(TASK, data, 0, finished.folder / "work" / "weights", "cpu")
    for fit in (knn.fit, vim.fit):
        readout, whole = fit(bench.readout.network, bench.readout.train), fit(bench.map.network, bench.train)
        for x in (bench.test[0], bench.outside["SVHN"]):
            torch.testing.assert_close(readout(bench.readout.at(x)), whole(x), rtol=1e-5, atol=1e-5)


def test_outputs_are_computed_once(finished: Finished, data: Photographs):
    bench = PhotoBench(TASK, data, 0, finished.folder / "work" / "weights", "cpu")
    posterior, x = bench.ensemble, bench.test[0]
    assert posterior.outputs(x) is posterior.outputs(x)
    assert replace(posterior, likelihood=posterior.likelihood).outputs(x) is posterior.outputs(x)
    narrower = posterior.narrowed(0.5)
    assert not torch.equal(narrower.outputs(x), posterior.outputs(x))
    assert torch.equal(posterior.outputs(x)[1], bench.member(1).outputs(x)[0])


def test_collapse_by_hand(generator):
    means = torch.tensor([[3.0, 0.0], [-3.0, 0.0]])
    y = torch.arange(2).repeat(5000)
    features = means[y] + 0.3 * torch.randn(10_000, 2, generator=generator)
    x = torch.randn(500, 2, generator=generator)
    found = collapse_of(features, y, x, x)
    assert found["within"] == pytest.approx(2 * 0.09 / 9, rel=0.05)
    assert found["dimensions"] == pytest.approx(1.0, abs=0.05)
    assert found["far_stays_far"] == 1.0
    assert collapse_of(features, y, x, torch.randn(500, 2, generator=generator))["far_stays_far"] < 0.55


# Plan and page


def test_a_gpu_has_the_papers_network_and_a_cpu_says_that_it_has_not():
    large, small = task_for("cuda:0"), task_for("cpu")
    assert (large.network, large.epochs, large.draws, large.members) == (wide_resnet, 42, 20, 5)
    assert "not the paper's" in small.settings["network"]
    assert set(IMAGES["cifar10"]) <= set(table())
    assert all(set(row.detection) <= set(large.outside) for row in IMAGES["cifar10"].values())


def test_the_rule_is_that_of_the_library():
    """Whoever changes one of these says in `not_blind` what was seen before, and then changes the plan."""
    x = torch.rand(6, 3, 32, 32)
    assert plan()["scoring"] == {
        "defaults": DEFAULTS,
        "ridge": weighing.RIDGE,
        "least_doubt": weighing.LEAST_DOUBT,
        "threshold": verdicts.THRESHOLD,
        "nearer": verdicts.NEARER,
        "largest_covariance": choosing.LARGEST_COVARIANCE,
        "guard": inspect.signature(calibrate).parameters["guard"].default,
        "radius": inspect.signature(choosing.informative).parameters["radius"].default,
        "kinds": list(outliers.synthetic(x, x)),
        "near_kinds": list(outliers.near(x, x)),
    }
    assert "λ = 4" in plan()["rule"]
    assert "half of the largest weight" in plan()["rule"]


def test_the_page_is_made_of_the_file(finished: Finished, tmp_path: Path):
    assert "## CIFAR-10" not in results_page(tmp_path).text
    (tmp_path / "cifar10.json").write_text(json.dumps(finished.outcome.numbers), encoding="utf-8")
    text = results_page(tmp_path).text
    assert "## CIFAR-10" in text
    for words in (" ".join(plan()["rule"].split()), plan()["not_blind"][0]["change"], "not the paper's", "λ = 0.01"):
        assert words in text
    for row in table():
        assert f"| {row}" in text, row


def test_the_page_says_which_networks_were_trained_again(finished: Finished, tmp_path: Path):
    text = "Trained again, as the run went on where the weights were not: network-0."
    numbers = json.loads(json.dumps(finished.outcome.numbers))
    for expected in (False, True):
        (tmp_path / "cifar10.json").write_text(json.dumps(numbers), encoding="utf-8")
        assert (text in results_page(tmp_path).text) is expected
        numbers["runs"][0]["units"]["variational"][0]["training_seconds"]["network-0"] = 1.0


def test_the_page_says_what_is_unfinished(tmp_path: Path):
    stopped = cifar_run.run_task("cifar10", TASK, Run(tmp_path / "work", minutes=0)).numbers
    (tmp_path / "cifar10.json").write_text(json.dumps(stopped), encoding="utf-8")
    assert "Not finished" in results_page(tmp_path).text
