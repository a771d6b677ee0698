"""Experiments, command line and README: small runs of the real thing."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cases import coarsely
from dapcal.cli import app
from dapcal.experiments import DEMO, EXPERIMENTS, plots
from dapcal.experiments.page.results import results_page
from dapcal.experiments.page.tables import posteriors_table, results_table, toys_table, with_table
from dapcal.experiments.plots import mesh
from dapcal.experiments.records import Outcome, Run, one_thread
from dapcal.experiments.runner import run_and_write, write_page
from dapcal.experiments.toys import every_posterior, posterior_plots, sinusoid, two_moons
from forks import command, forked

ROOT = Path(__file__).parent.parent


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Too few epochs for a good posterior and values of φ for the best, enough to run everything."""
    for module in (two_moons, sinusoid):
        monkeypatch.setattr(module, "MAP_EPOCHS", 10)
        monkeypatch.setattr(module, "POINTS", 200)
        monkeypatch.setattr(module, "DRAWS", 10)
    monkeypatch.setattr(two_moons, "VI_EPOCHS", 10)
    few = {"DRAWS": 8, "MEMBERS": 2, "NUTS_DRAWS": 4, "NUTS_WARM_UP": 4, "NUTS_DEPTH": 2, "EPOCHS": 8}
    for name, value in few.items():
        monkeypatch.setattr(every_posterior, name, value)
    for module in (two_moons, posterior_plots):
        monkeypatch.setattr(module, "mesh", lambda low, high, _: mesh(low, high, 21))
    monkeypatch.setitem(plots._STYLE, "savefig.dpi", 30)
    with coarsely(15):  # what a figure shows needs several
        yield


STAGES = {
    "two-moons": {"MAP network", "variational posterior", "calibrating", "figures"},
    "sinusoid": {"MAP network", "calibrating", "figures"},
    "posteriors": {"two moons", "sinusoid"},
}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", list(STAGES))
def test_an_experiment_writes_numbers_and_figures(name: str, tmp_path: Path):
    stages: dict[str, tuple[int, int]] = {}
    run = Run(tmp_path / "unfinished", progress=lambda s, done, n: stages.update({s: (done, n)}))
    outcome = run_and_write(name, EXPERIMENTS[name], tmp_path, run)
    page = write_page(tmp_path, {name: (EXPERIMENTS[name], outcome)})
    numbers = json.loads((tmp_path / f"{name}.json").read_text())
    assert all(done == total for done, total in stages.values())
    assert set(stages) == STAGES[name]
    assert numbers.get("seeds", [numbers.get("seed")]) == [0]
    assert numbers["environment"]["torch"] == torch.__version__
    assert numbers == json.loads(json.dumps(outcome.numbers))
    images = re.findall(r'src="([^"]+)"', page.read_text())
    assert len(images) == len(outcome.pictures)
    for image in images:
        assert (tmp_path / image).read_bytes().startswith(b"\x89PNG")
    captions = [p.caption for p in outcome.pictures]
    assert all(caption.rstrip(".").count(". ") == 1 for caption in captions), "two sentences each"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.usefixtures("short")
def test_several_seeds_stand_in_one_file_and_each_is_that_of_a_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_and_write("sinusoid", EXPERIMENTS["sinusoid"], tmp_path / "alone", Run(tmp_path / "a", seed=2))
    asked, plain = [], sinusoid._one
    monkeypatch.setattr(sinusoid, "_one", lambda this: (asked.append(this.seed), plain(this))[1])
    run = Run(tmp_path / "unfinished", seed=1, seeds=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sinusoid, "_pictures", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))  # of the first seed
        with pytest.raises(KeyboardInterrupt):
            run_and_write("sinusoid", EXPERIMENTS["sinusoid"], tmp_path, run)
    outcome = run_and_write("sinusoid", EXPERIMENTS["sinusoid"], tmp_path, run)
    assert asked == [2, 1, 1]  # the second seed was finished, and taken over
    found = json.loads((tmp_path / "sinusoid.json").read_text())
    assert found["seeds"] == [run["seed"] for run in found["runs"]] == [1, 2]
    assert [("curve" in run["ours"]) for run in found["runs"]] == [True, False]
    assert len(outcome.pictures) == 2
    expected = json.loads((tmp_path / "alone" / "sinusoid.json").read_text())["runs"][0]
    for numbers in (expected, found["runs"][1]):
        del numbers["seconds"]
    for who in ("ours", "paper"):
        del expected[who]["curve"]
    assert found["runs"][1] == expected


def test_tables_of_toys_have_means_and_standard_errors_over_seeds(tmp_path: Path):
    def run(seed: int) -> dict:
        both = {
            name: [0.5 + seed, 0.25 + seed] for name in ("confidence_far_away", "held_out_accuracy", "held_out_nll")
        }
        own = both | {"band_over_training_q95": [[1.0, 2.0, 3.0], [4.0 + 2 * seed, 5.0, 6.0]]}
        return {"seed": seed, "ours": own, "paper": own}

    for name in DEMO:
        data = {"environment": {"torch": "2.9", "commit": "abc"}, "runs": [run(seed) for seed in range(3)]}
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    text = toys_table(tmp_path)
    # of 0, 1, 2: mean 1, standard error 1/√3 = 0.577
    assert "away from the data | 1.500 ± 0.577 | 1.250 ± 0.577 | 1.250 ± 0.577 |" in text
    assert "at x = −10 | 1.0 ± 0.0 | 6.0 ± 1.2 | 6.0 ± 1.2 |" in text
    assert "over seeds 0 to 2, torch 2.9, commit abc." in text


def test_two_moons_lie_on_half_circles():
    x, y = two_moons.moons(400, 0.0, torch.Generator().manual_seed(0))
    centers = torch.tensor([[0.0, 0.0], [1.0, 0.5]])[y]
    torch.testing.assert_close((x - centers).norm(dim=1), torch.ones(400))
    assert (x[y == 0, 1] >= 0).all()
    assert (x[y == 1, 1] <= 0.5).all()


def test_the_papers_epistemic_variance_is_the_variance_of_the_mean(posterior, blobs):
    """With equal weights it is the plain variance over draws, summed over both classes."""
    outputs = torch.randn(20, 6, 1, generator=torch.Generator().manual_seed(0)).double()

    class Draws:
        @staticmethod
        def expect(f):
            return f(outputs).mean(0)

    expected = 2 * torch.sigmoid(outputs[..., 0]).var(0, correction=0)
    torch.testing.assert_close(two_moons.papers_epistemic(Draws()), expected)


def test_one_thread_restores_the_number_of_threads():
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("short")
def test_demo_prints_where_the_page_is_and_a_repeated_run_gives_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    nothing = EXPERIMENTS["two-moons"]._replace(run=lambda run: Outcome({"seed": run.seed}, []))
    monkeypatch.setitem(EXPERIMENTS, "two-moons", nothing)  # which another test runs
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo")])
    assert result.exit_code == 0, result.output
    page = Path(result.stdout.strip().splitlines()[-1])
    assert page == tmp_path / "demo" / "index.html"
    assert all(EXPERIMENTS[name].title in page.read_text() for name in DEMO)
    first = json.loads((tmp_path / "demo" / "sinusoid.json").read_text())
    again = run_and_write("sinusoid", EXPERIMENTS["sinusoid"], tmp_path, Run(tmp_path / "unfinished")).numbers
    again = json.loads(json.dumps(again))
    for numbers in (first, again):
        del numbers["seconds"], numbers["runs"][0]["seconds"]
    assert again == first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["reproduce", "three-moons"], "two-moons, sinusoid, posteriors"), (["demo", "--out", __file__], "a file")],
)
def test_wrong_arguments_exit_with_2(arguments: list[str], words: str):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.stderr.replace("\n", " ")


def test_version():
    import dapcal

    assert CliRunner().invoke(app, ["--version"]).stdout.strip() == dapcal.__version__


def test_an_interrupted_run_leaves_no_half_written_file(tmp_path: Path):
    """By SIGINT; test_cli_tables_refused.py has SIGTERM, which ends a command in the same way."""
    out = tmp_path / "demo"
    with forked(command("demo", "--out", out)) as process:
        until = time.monotonic() + 60
        while not out.exists():  # it is made when the first experiment begins
            assert time.monotonic() < until
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGINT)
        assert process.ended() == 130
        assert "Traceback" not in process.stderr.read()
    for path in out.iterdir():
        assert not path.name.startswith("."), "a part file was left"
        assert path.stat().st_size > 0
    assert not (out / "index.html").exists()


@pytest.mark.parametrize(("page", "table"), [("README.md", results_table), ("docs/posteriors.md", posteriors_table)])
def test_the_pages_show_the_result_files(page, table):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert with_table(text, table(ROOT / "results")) == text, "run `make results`"


def test_the_result_files_meet_what_is_promised():
    """Two moons and sinusoid with the default, as committed."""
    moons, waves = (json.loads((ROOT / "results" / f"{n}.json").read_text()) for n in ("two-moons", "sinusoid"))
    moons, waves = (data.get("runs", [data])[0]["ours"] for data in (moons, waves))
    assert moons["confidence_far_away"][0] > 0.9
    assert moons["confidence_far_away"][1] <= 0.58
    assert abs(moons["held_out_accuracy"][1] - moons["held_out_accuracy"][0]) <= 0.003
    assert moons["held_out_nll"][1] - moons["held_out_nll"][0] <= 0.01
    assert min(waves["band_over_training_q95"][1]) >= 3
    assert max(waves["band_widening_in_clusters_mean_max"]) <= 1.1


def test_every_posterior_becomes_unsure_away_from_the_moons():
    """As committed: confidence falls towards one half, accuracy stays, the NLL rises by about the guard at most."""
    found = json.loads((ROOT / "results" / "posteriors.json").read_text())["two moons"]
    assert set(found) == set(every_posterior.METHODS)
    for moons in found.values():
        before, after = moons["confidence_far_away"]
        assert before > 0.85
        assert after < 0.65
        assert moons["held_out_accuracy"][0] == moons["held_out_accuracy"][1]
        assert moons["held_out_nll"][1] - moons["held_out_nll"][0] <= 0.011


def test_the_results_page_shows_the_result_files():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert results_page(ROOT / "results").text == text, "run `make page`"


@pytest.mark.parametrize(
    ("name", "outside", "by_score", "by_entropy"),
    [
        ("fashion-mnist", "MNIST", 99.0, 97.5),
        ("mnist", "Fashion-MNIST", 98.5, 97.5),
        ("mnist", "SVHN", 99.3, 99.5),
        ("mnist", "Omniglot", 95.3, 93.5),
    ],
)
def test_the_default_tells_images_apart_and_keeps_its_predictions(name, outside, by_score, by_entropy):
    """As committed, means over the seeds."""
    runs = [run["rows"] for run in json.loads((ROOT / "results" / f"{name}.json").read_text())["runs"]]

    def mean(row, *path):
        values = []
        for run in runs:
            value = run[row]
            for step in path:
                value = value[step]
            values.append(value)
        return sum(values) / len(values)

    assert len(runs) == 5
    assert 100 * mean("DAP, ours", "ood", "OOD score", outside, "auroc") >= by_score
    assert 100 * mean("DAP, ours", "ood", "entropy", outside, "auroc") >= by_entropy
    assert mean("DAP, ours", "test", "accuracy") == mean("VI", "test", "accuracy")
    assert mean("DAP, ours", "test", "nll") - mean("VI", "test", "nll") <= 0.015


def test_the_default_in_gaps_of_tables():
    """As committed; and the paper's rescue of naval, by weights that vanish."""
    found = json.loads((ROOT / "results" / "uci-gap.json").read_text())["summary"]
    assert found["naval"]["VI + ours"]["log_likelihood"]["mean"] >= 1
    for posterior in ("VI", "VI, untuned"):
        assert (
            found["energy"][f"{posterior} + ours"]["log_likelihood_gain"]["mean"] >= 0.5
        )  # 1 before the guard of today
        for table in ("boston", "concrete", "wine"):
            assert found[table][f"{posterior} + ours"]["log_likelihood_gain"]["mean"] >= -0.06
    naval = found["naval"]
    assert naval["VI, untuned"]["log_likelihood"]["mean"] < -30
    assert -9 <= naval["VI, untuned + paper"]["log_likelihood"]["mean"] <= -3
    assert naval["VI, untuned + paper"]["log_likelihood_mixture"]["mean"] < -100
