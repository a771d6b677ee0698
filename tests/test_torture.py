"""A small share of `make torture`, and how it goes on after an interruption."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from torture import __main__ as torture
from torture import kills, numerics, service, states, validity
from torture.tally import Tally


def test_a_few_kills_leave_no_file_half_or_mixed():
    tried, failed = kills.run(1, 1)  # a command, which writers meet at too
    assert tried > 20
    assert failed == []


def test_the_service_stands_a_little_of_everything():
    tried, failed = service.run(160, 0)
    assert tried > 250
    assert failed == []


def test_files_say_what_was_saved_last_in_any_order_of_steps():
    tried, failed = states.run(3, 0)
    assert tried > 20
    assert failed == []


def test_numbers_of_any_size_are_refused_or_predicted_sanely():
    assert numerics.run(10, 0) == (10, [])


def test_promises_are_kept_over_refits():
    tried, failed = validity.run(4, 0)
    assert tried == 11  # refits, and promises of classes and numbers
    assert failed == []


def test_a_broken_promise_is_noticed():
    tally = Tally("validity")
    validity.judge({"classes: 0.1 flagged": [0.2, 0.21, 0.19], "numbers: 0.05 outside": [0.05, 0.04, 0.06]}, tally)
    assert tally.tried == 2
    assert tally.failed == ["validity: classes: 0.1 flagged: 0.2000 ± 0.0047 over 3 refits"]


def test_an_interrupted_run_goes_on_and_the_table_counts_all(tmp_path: Path, monkeypatch, capsys):
    calls: list[tuple[int, int]] = []

    def run(count: int, seed: int) -> tuple[int, list[str]]:
        if len(calls) == 2 and (count, seed) not in calls and "stop" not in monkeypatched:
            monkeypatched.append("stop")
            raise KeyboardInterrupt
        calls.append((count, seed))
        return count, ["something"] * (seed == 7)

    monkeypatched: list[str] = []
    monkeypatch.setitem(sys.modules, "torture.some", SimpleNamespace(run=run, __spec__=torture.__spec__))
    monkeypatch.setattr(torture, "PARTS", (torture.Part("some", 25, 5, 10),))
    out = tmp_path / "results.json"
    told = ["torture", "--seed", "5", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", told)
    with pytest.raises(KeyboardInterrupt):
        torture.main()
    found = json.loads(out.read_text())
    assert {number: piece[:2] for number, piece in found["pieces"]["some"].items()} == {"0": [10, 0], "1": [10, 0]}
    assert found["missing"] == {"some": [5, 25]}
    with pytest.raises(SystemExit) as ended:
        torture.main()
    assert calls == [(10, 5), (10, 6), (5, 7)]
    assert ended.value.code == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["in", "all", "25", "1"]
    record = json.loads(out.read_text())
    assert record["parts"] == {"some": {"tried": 25, "failed": 1, "seconds": 0}}
    assert record["missing"] == {}
    assert record["kind"]["seed"] == 5
    assert len(record["commits"]) == 1
    assert "torch" in record["environment"]
    with pytest.raises(SystemExit):
        torture.main()  # all was done, so it begins anew
    assert calls[3:] == calls[:3]


def test_pieces_at_a_time_are_counted_together(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(torture, "PARTS", (torture.Part("numerics", 4, 4, 2),))
    monkeypatch.setattr(sys, "argv", ["torture", "--jobs", "2", "--out", str(tmp_path / "found.json")])
    with pytest.raises(SystemExit) as ended:
        torture.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["in", "all", "4", "0"]
