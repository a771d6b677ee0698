"""The runner and the command line: result files, unfinished work, interruptions, plain messages."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from dapcal import cli
from dapcal.experiments import EXPERIMENTS, parallel, runner
from dapcal.experiments.images.run import run_task, settings
from dapcal.experiments.records import Experiment, Outcome, Run
from dapcal.experiments.runner import as_json, run_and_write
from image_cases import TASK, doze

BLOBS = Experiment(
    "Blobs", "Made up.", partial(run_task, "blobs", TASK), ("seeds", "device", "parts", "jobs", "full"), settings(TASK)
)
SHORT = {"seeds": 2, "parts": ("paper",)}
FORK = multiprocessing.get_context("fork")
PROCESSES = Path("/proc")
sees_processes = pytest.mark.skipif(not (PROCESSES / "self" / "stat").exists(), reason="looks at processes in /proc")


def small_run(folder: Path, jobs: int = 1) -> None:
    run_and_write("blobs", BLOBS, folder, Run(folder / "unfinished", jobs=jobs, **SHORT))


def numbers_of(folder: Path) -> dict:
    """The result file, but for times."""
    numbers = json.loads((folder / "blobs.json").read_text(encoding="utf-8"))
    for run in numbers["runs"]:
        for row in run["rows"].values():
            del row["seconds"]
    return numbers


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("whole")
    small_run(folder)
    return numbers_of(folder)


def members(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for path in PROCESSES.glob("[0-9]*/stat"):
        try:
            state, _, own, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended since
            continue
        if int(own) == group and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def assert_all_end(group: int, seconds: float = 60) -> None:
    try:
        wait_for(lambda: not members(group), seconds)
    finally:
        for process in members(group):
            os.kill(process, signal.SIGKILL)


def finished_files(folder: Path) -> int:
    """Checkpoints and rows, without those that are being written."""
    return sum(not path.name.startswith(".") for path in (folder / "unfinished").glob("blobs/seed-*/*"))


# Killed and gone on


@sees_processes
@pytest.mark.parametrize("jobs", [1, 2])
def test_kills_at_random_moments_change_nothing(jobs: int, uninterrupted: dict, tmp_path: Path, monkeypatch):
    """Runs that are killed, later and later; one process finishes what two have begun.

    Processes are forked: so they have imported everything, which spares minutes.
    """
    moments = random.Random(jobs)
    monkeypatch.setattr(parallel, "get_context", lambda _: FORK)

    def run() -> None:
        os.setsid()
        small_run(tmp_path, jobs)

    for files in (0, 3, 12):  # of 18
        while True:
            child = FORK.Process(target=run)
            child.start()
            wait_for(lambda child=child, files=files: finished_files(tmp_path) >= files or not child.is_alive())
            child.join(moments.uniform(0, 0.1))
            if child.exitcode is None:
                break
            assert child.exitcode == 0
            (tmp_path / "blobs.json").unlink()  # came to its end before the kill: start anew
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert not (tmp_path / "blobs.json").exists()
        assert_all_end(child.pid)  # the processes of a killed run too
    small_run(tmp_path)
    assert numbers_of(tmp_path) == uninterrupted
    assert [path.name for path in tmp_path.iterdir()] == ["blobs.json"]


# Looked at


def test_calls_that_follow_from_others_are_waited_for_too():
    with parallel.processes(1) as submit:
        calls = [submit(str, 1), submit(str, 2)]
        found = []
        for finished in parallel.looks(calls):
            found.append([call.result() for call in finished])
            if len(found) == 1:
                calls += [submit(str, 3)]
    assert found == [["1", "2"], ["3"]]
    assert not calls


def test_the_first_error_is_raised_though_other_calls_go_on():
    failed: Future[None] = Future()
    failed.set_exception(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        list(parallel.looks([Future(), failed]))


# Interrupted


def dozing(run: Run) -> Outcome:
    with parallel.processes(run.jobs) as submit:
        for _ in parallel.looks([submit(doze, run.work / str(number)) for number in range(5)]):
            pass
    raise AssertionError


class Ended(NamedTuple):
    """A program that was ended."""

    code: int
    stderr: str


def blown(folder: Path, blow: signal.Signals, due: Callable[[int], bool], fresh: bool = True) -> Ended:
    """`dapcal reproduce dozing` with two jobs until something is due in its group of processes; then the blow.

    The program itself is forked, which spares its imports; the processes that it starts are only where they need not be
    fresh.
    """
    told = folder.with_suffix(".stderr")

    def command_line() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stderr = told.open("w", encoding="utf-8", buffering=1)
        os.dup2(sys.stderr.fileno(), 2)  # of the processes that it starts
        resource_tracker._resource_tracker._fd = None  # it has one of its own, as a program has
        if not fresh:
            parallel.get_context = lambda _: FORK
        EXPERIMENTS["dozing"] = BLOBS._replace(run=dozing)
        sys.argv[1:] = ["reproduce", "dozing", "--out", str(folder), "--jobs", "2", "--seeds", "2", "--parts", "paper"]
        cli.main()

    process = FORK.Process(target=command_line)
    process.start()
    wait_for(lambda: due(process.pid) or not process.is_alive())
    if blow == signal.SIGINT:
        os.killpg(process.pid, blow)  # to all of them, as a terminal does
    else:
        os.kill(process.pid, blow)
    assert_all_end(process.pid)
    process.join()
    return Ended(process.exitcode, told.read_text(encoding="utf-8"))


def blown_at_work(folder: Path, blow: signal.Signals, fresh: bool = True) -> tuple[Ended, set[str]]:
    """When both processes are at work; and the names in the folder of unfinished work."""
    work = folder / "unfinished" / "dozing"
    ended = blown(folder, blow, lambda _: {"0", "1"} <= {path.name for path in work.glob("*")}, fresh)
    return ended, {path.name for path in work.iterdir()}


@sees_processes
def test_ctrl_c_as_processes_start(tmp_path: Path):
    def due(group: int) -> bool:
        return len(members(group)) == 4 and time.sleep(0.3) is None  # with the tracker of their semaphores

    ended = blown(tmp_path / "out", signal.SIGINT, due)
    assert ended.code == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["unfinished"]


@sees_processes
def test_ctrl_c_ends_processes_that_are_at_work(tmp_path: Path):
    """All at once, and calls that wait are not begun; the work can be gone on from."""
    ended, begun = blown_at_work(tmp_path / "out", signal.SIGINT, fresh=False)
    assert ended.code == 130, ended.stderr
    assert "goes on from what is finished" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert begun == {"0", "1", "settings.json"}


@sees_processes
def test_a_killed_run_leaves_no_process(tmp_path: Path):
    """Though both are in the middle of a call."""
    ended, begun = blown_at_work(tmp_path / "out", signal.SIGKILL)
    assert ended.code == -signal.SIGKILL, ended.stderr
    assert begun == {"0", "1", "settings.json"}


# Result files


def two_numbers(run: Run) -> Outcome:
    """Goes on from `first`, where it was interrupted."""
    kept = run.work / "first"
    if not kept.exists():
        kept.write_text("1")
        raise InterruptedError
    return Outcome({"seed": run.seed, "first": json.loads(kept.read_text())}, [])


TWO = Experiment("Two", "Interrupted once.", two_numbers, ("seeds", "device", "jobs"), {"rate": 0.1})


def interrupted(folder: Path, experiment: Experiment = TWO, **options) -> Run:
    run = Run(folder / "unfinished", **options)
    with pytest.raises(InterruptedError):
        run_and_write("two", experiment, folder, run)
    return run


def test_a_run_goes_on_and_its_work_is_removed(tmp_path: Path):
    run = interrupted(tmp_path, seed=3)
    for left in (tmp_path / f".two.json.{'0' * 16}.part", run.work / "two" / f".first.{'0' * 16}.part"):
        left.write_text("half")
        os.utime(left, (0, 0))  # nobody's since long
    outcome = run_and_write("two", TWO, tmp_path, run)
    assert json.loads((tmp_path / "two.json").read_text()) == outcome.numbers == {"seed": 3, "first": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["two.json"]


@pytest.mark.parametrize("there", ["what was there before", "[]", '{"unfinished": 3}', "\x00\x01"])
def test_what_stood_in_place_of_a_result_is_written_over(there, tmp_path: Path):
    run = interrupted(tmp_path)
    (tmp_path / "two.json").write_text(there)
    outcome = run_and_write("two", TWO, tmp_path, run)
    assert json.loads((tmp_path / "two.json").read_text()) == outcome.numbers


def test_other_unfinished_work_is_left_alone(tmp_path: Path):
    run = interrupted(tmp_path)
    other = tmp_path / "unfinished" / "three" / "settings.json"
    other.parent.mkdir()
    other.write_text("{}")
    run_and_write("two", TWO, tmp_path, run)
    assert other.exists()
    assert not (tmp_path / "unfinished" / "two").exists()


@pytest.mark.parametrize("change", [{"seed": 1}, {"seeds": 4}, {"device": "meta"}, "settings"], ids=str)
def test_unfinished_work_of_other_settings_is_refused(change, tmp_path: Path):
    run = interrupted(tmp_path)
    experiment = TWO._replace(settings={"rate": 0.2}) if change == "settings" else TWO
    changed = run if change == "settings" else replace(run, **change)
    with pytest.raises(
        ValueError, match=r"two holds unfinished work .*delete the folder, or name another --out"
    ) as told:
        run_and_write("two", experiment, tmp_path, changed)
    assert str(tmp_path / "unfinished" / "two") in str(told.value)
    assert not (tmp_path / "two.json").exists()
    assert run_and_write("two", TWO, tmp_path, run).numbers["first"] == 1, "and is as it was"


def test_another_number_of_jobs_may_finish_the_work(tmp_path: Path):
    run = interrupted(tmp_path, jobs=1)
    assert run_and_write("two", TWO, tmp_path, replace(run, jobs=7)).numbers["first"] == 1


def test_where_nothing_was_finished_nothing_is_refused(tmp_path: Path):
    """An experiment of seconds keeps no work: interrupted, it may be run with another seed."""

    def fails(run: Run) -> Outcome:
        raise InterruptedError

    run = interrupted(tmp_path, TWO._replace(run=fails))
    with pytest.raises(InterruptedError):
        run_and_write("two", TWO, tmp_path, replace(run, seed=5))


def test_work_that_was_being_removed_is_not_taken_up(tmp_path: Path):
    """A run that is killed as it ends may leave rows without the settings that they were made with."""
    run = interrupted(tmp_path)
    (run.work / "two" / "settings.json").unlink()
    interrupted(tmp_path, seed=8)
    assert run_and_write("two", TWO, tmp_path, replace(run, seed=8)).numbers == {"seed": 8, "first": 1}


def test_a_file_names_the_commits_of_all_sittings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def in_sittings(run: Run) -> Outcome:
        (run.work / "first").touch()
        sitting = len(commits)
        if sitting == 1:
            raise InterruptedError
        return Outcome({"environment": {"commit": "now"}, "settings": {"a": 1}}, [], unfinished=0)

    commits: list[str] = []

    def commit() -> str:
        commits.append("xy"[len(commits)])
        return commits[-1]

    monkeypatch.setattr(runner, "commit", commit)
    experiment = Experiment("Sittings", "", in_sittings)
    with pytest.raises(InterruptedError):
        run_and_write("sittings", experiment, tmp_path, Run(tmp_path / "unfinished"))
    numbers = run_and_write("sittings", experiment, tmp_path, Run(tmp_path / "unfinished")).numbers
    assert numbers["environment"]["commit"] == "x; y"


@pytest.mark.parametrize(
    ("settings", "made_on", "expected"),
    [({"a": 1}, {"commit": "w"}, "w; x"), ({"a": 1}, {}, "not recorded; x"), ({"a": 2}, {"commit": "w"}, "x")],
)
def test_an_unfinished_file_that_is_gone_on_with_keeps_its_commits(
    settings, made_on, expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runner, "commit", lambda: "x")
    before = {"environment": made_on, "settings": settings, "unfinished": ["seed 1: MAP"]}
    (tmp_path / "more.json").write_text(json.dumps(before))
    now = {"environment": {"commit": "x"}, "settings": {"a": 1}}
    experiment = Experiment("More", "", lambda _: Outcome(now, []))
    run_and_write("more", experiment, tmp_path, Run(tmp_path / "unfinished"))
    assert json.loads((tmp_path / "more.json").read_text())["environment"]["commit"] == expected


PLAIN = {
    "numbers": [1, -2.5, 1e-300, 1e22, 0, None],
    "nested": [[1, 2], [[3.5], []], {"deep": [[4, 5], [6, None]]}],
    "mixed": [1, "two", [3, "four, 5"], True, {"a": [1, 2]}],
    "strings": [
        "[1,2]",
        "[ 1  2 ]",
        "a [3,\t4] b",
        '"[5,6]"',
        "\\",
        '\\"[7,8]',
        "[",
        "]",
        "[e,E]",
        "[null,null]",
        "[-]",
    ],
    "[9,10]": {"φ, [1,2]": "[11,\n12]", "": []},
    "empty": [[], {}, [[]]],
}


def test_json_is_read_back_as_it_was():
    assert json.loads(as_json(PLAIN)) == PLAIN
    assert json.loads(as_json("[1,2]")) == "[1,2]"
    back = json.loads(as_json({"x": [math.nan, math.inf, -math.inf, 1.0]}))["x"]
    assert math.isnan(back[0])
    assert back[1:] == [math.inf, -math.inf, 1.0]


def test_json_of_random_nests_is_read_back_as_it_was():
    draw = random.Random(0)

    def nest(depth: int) -> object:
        kind = draw.randrange(6 if depth else 4)
        if kind == 0:
            return draw.choice([0, -1, 2.5, 1e-9, None, True, False])
        if kind == 1:
            return draw.gauss(0, 1e5)
        if kind < 4:
            return "".join(draw.choice('[],1e "\\\nφ') for _ in range(draw.randrange(12)))
        if kind == 4:
            return [nest(depth - 1) for _ in range(draw.randrange(5))]
        return {str(nest(0)): nest(depth - 1) for _ in range(draw.randrange(4))}

    for _ in range(2000):
        value = nest(3)
        assert json.loads(as_json(value)) == value


def test_lists_of_numbers_take_one_line():
    text = as_json({"a": [1, -2.5e-10, None], "b": [[1.0, 2], [3, math.nan]], "c": ["x", 1]})
    lines = [line.strip().rstrip(",") for line in text.splitlines()]
    assert '"a": [1, -2.5e-10, null]' in lines
    assert "[1.0, 2]" in lines
    assert "[3, NaN]" in lines
    assert '"x"' in lines
    assert text.endswith("}\n")


# Command line


def dapcal(*arguments: str):
    return CliRunner().invoke(cli.app, [*map(str, arguments)])


def test_an_option_that_is_not_heeded_is_refused(tmp_path: Path):
    result = dapcal("reproduce", "posteriors", "--seeds", "2", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.strip() == "posteriors has no option --seeds; it has --seed."
    result = dapcal("reproduce", "uci-gap", "--device", "cpu", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.strip() == "uci-gap has no option --device; it has --seed, --seeds, --jobs."
    assert not (tmp_path / "out").exists()


def assert_plain(result, code: int = 1) -> None:
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), "an error that nobody caught"
    assert "Traceback" not in result.output


def test_unknown_parts_give_a_plain_message(tmp_path: Path):
    result = dapcal("reproduce", "mnist", "--parts", "paper, nonsense", "--out", tmp_path)
    assert_plain(result)
    assert "Expected parts among paper, ours, posteriors," in result.stderr
    assert result.stderr.strip().endswith("got nonsense")


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    ("name", "file"), [("mnist", "mnist/train-images-idx3-ubyte.gz"), ("uci-gap", "uci/boston.csv")]
)
def test_missing_data_give_a_plain_message(name: str, file: str, jobs: int, tmp_path: Path, monkeypatch):
    places = {"DAPCAL_DATA": tmp_path / "data", "DAPCAL_CACHE": tmp_path / "cache"}
    for variable, place in places.items():
        place.mkdir()
        monkeypatch.setenv(variable, str(place))
    monkeypatch.setitem(sys.modules, "torchvision", None)  # no test goes out
    result = dapcal("reproduce", name, "--jobs", jobs, "--out", tmp_path / "out")
    assert_plain(result)
    assert file in result.stderr
    assert str(places["DAPCAL_DATA"] / file) in result.stderr, "not broken over lines"
    assert str(places["DAPCAL_CACHE"] / "data" / file) in result.stderr
    assert "Set DAPCAL_DATA to a folder" in result.stderr


DEVICES = ["nonsense", *([] if torch.cuda.is_available() else ["cuda", "cuda:1"])]


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_that_is_not_there_gives_a_plain_message(device: str, tmp_path: Path):
    result = dapcal("reproduce", "mnist", "--device", device, "--out", tmp_path)
    assert_plain(result)
    assert f"Expected a device that torch can use here, got {device}: " in result.stderr
    assert result.stderr.strip().endswith("try --device cpu")
    assert not (tmp_path / "unfinished").exists()


@pytest.mark.parametrize("command", [["demo"], ["reproduce", "two-moons"]])
@pytest.mark.parametrize("error", [ValueError, OSError, ImportError])
def test_errors_with_a_remedy_are_printed_as_they_are(command, error, tmp_path: Path, monkeypatch):
    def fails(run: Run) -> Outcome:
        raise error("x needs y; install it with: pip install 'dapcal[experiments]' " + "at length " * 20 + "[bold]!")

    monkeypatch.setitem(EXPERIMENTS, "two-moons", EXPERIMENTS["two-moons"]._replace(run=fails))
    result = dapcal(*command, "--out", tmp_path)
    assert_plain(result)
    assert "pip install 'dapcal[experiments]' at length" in result.stderr
    assert result.stderr.strip().endswith("at length [bold]!")


def test_the_unfinished_work_of_another_seed_gives_a_plain_message(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "two", TWO)
    assert_plain(dapcal("reproduce", "two", "--out", tmp_path))
    result = dapcal("reproduce", "two", "--out", tmp_path, "--seed", 1)
    assert_plain(result)
    assert f"{tmp_path / 'unfinished' / 'two'} holds unfinished work" in result.stderr
    assert dapcal("reproduce", "two", "--out", tmp_path, "--jobs", 3).exit_code == 0
    assert (tmp_path / "two.json").exists()
