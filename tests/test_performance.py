"""How speed is measured: rows that hold together, ways in turns, processes of their own, a run that goes on."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from performance import __main__ as bench
from performance.no_torchvision import _Finder
from performance.turns import in_turns, shares

from dapcal.experiments.performance import AS_FAST, Limit, Line, Row, from_plain, to_plain

ROW = Row("search", "s", [1.0, 3.0, 2.0], "faiss", [2.0, 2.0, 2.0], AS_FAST)


def test_ratios_are_taken_run_by_run():
    assert ROW.ratio == (1.0, 0.5, 1.5)
    assert ROW.met
    assert not replace(ROW, limit=Limit(0.9)).met
    assert replace(ROW, limit=None).met is None
    rates = replace(ROW, unit="rows/s", limit=Limit(0.9, least=True))
    assert rates.met
    assert not replace(rates, limit=Limit(1.2, least=True)).met


def test_a_limit_may_be_of_our_own_number():
    alone = Row("latency", "ms", [3.0, 5.0, 4.0], limit=Limit(4.0, "ours"))
    assert alone.ratio is None
    assert alone.met
    assert from_plain(json.loads(json.dumps(to_plain(alone)))) == alone


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ours": []}, "Expected a number for every run of 'search', got none"),
        ({"theirs": [1.0]}, r"as many runs of the peer as of ours in 'search' \(3\), got 1 of faiss"),
        ({"peer": ""}, "got 3 of nobody"),
        ({"peer": "", "theirs": []}, "Expected a peer for the limit of a ratio"),
    ],
)
def test_rows_that_do_not_hold_together_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(ROW, **change)
    with pytest.raises(ValueError, match='Expected `of` to be "ratio" or "ours"'):
        Limit(1.0, "theirs")


def test_slopes_are_those_of_the_larger_sizes():
    line = Line("search", "points", [10, 100, 1000, 10_000], [[5.0], [5.0], [0.1, 0.3, 0.2], [20.0]])
    assert line.medians == [5.0, 5.0, 0.2, 20.0]
    assert line.slope == pytest.approx(2.0)


def test_ways_take_turns_and_who_begins_changes():
    order: list[str] = []
    ways = {name: lambda name=name: order.append(name) for name in "abc"}
    found = in_turns(ways, 3, warm=False)
    assert "".join(order) == "abcbcacab"
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 3, "b": 3, "c": 3}
    in_turns(ways, 1)
    assert "".join(order[9:]) == "abcabc"


def test_a_profile_names_what_takes_the_time():
    def slow() -> int:
        return sum(number * number for number in range(200_000))

    found = shares(slow)
    assert set(found) == {"builtins.sum", "test_performance.<genexpr>"}
    assert sum(found.values()) == pytest.approx(1, abs=0.01)


def test_modules_stand_in_for_torchvision_alone():
    finder = _Finder()
    assert finder.find_spec("torch") is None
    module = finder.create_module(finder.find_spec("torchvision.models.resnet"))
    assert issubclass(type("Own", (module.ResNet,), {}), object)
    assert not hasattr(module, "__path_of_nothing__")


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three questions that are asked by writing them down; the second fails the first time."""
    asked: list[str] = []

    def ask(name: str, repeats: int, small: bool) -> dict | None:
        asked.append(name)
        failed = name == "b" and asked.count("b") == 1
        return None if failed else {"rows": [to_plain(ROW)], "seconds": 1.0, "load": [0.5, 0.5]}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "QUESTIONS", ("a", "b", "c"))
    monkeypatch.setattr(bench, "ask", ask)
    monkeypatch.setattr(bench, "commit", lambda: "abc")
    monkeypatch.setattr(bench, "PEERS", ("torch",))
    monkeypatch.setattr(sys, "argv", ["performance"])
    return asked


def test_a_run_goes_on_with_questions_that_have_no_answer(questions, monkeypatch):
    with pytest.raises(SystemExit, match="without an answer: b"):
        bench.main()
    assert json.loads(Path("results/performance.json").read_text())["missing"] == ["b"]
    bench.main()
    assert questions == ["a", "b", "c", "b"]
    found = json.loads(Path("results/performance.json").read_text())
    assert list(found["questions"]) == ["a", "b", "c"]
    assert found["missing"] == []
    assert found["questions"]["b"]["settings"].items() >= {"commit": "abc", "repeats": 5, "small": False}.items()
    monkeypatch.setattr(bench, "commit", lambda: "def")
    bench.main()
    assert questions[4:] == ["a", "b", "c"]


def test_one_question_is_asked_again_on_request(questions, monkeypatch):
    with pytest.raises(SystemExit):
        bench.main()
    monkeypatch.setattr(sys, "argv", ["performance", "--only", "b"])
    bench.main()
    bench.main()
    assert questions == ["a", "b", "c", "b", "b"]
    monkeypatch.setattr(sys, "argv", ["performance", "--only", "d"])
    with pytest.raises(SystemExit):
        bench.main()


def test_small_answers_are_kept_apart(questions, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["performance", "--small"])
    with pytest.raises(SystemExit):
        bench.main()
    bench.main()
    assert Path("build/performance-small.json").exists()
    assert not Path("results").exists()
