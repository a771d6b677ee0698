"""A small share of `make torture`, and how it goes on after an interruption."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from torture import __main__ as torture
from torture import kills, service


def test_a_few_kills_leave_no_file_half_or_mixed():
    tried, failed = kills.run(1, 1)  # a command, which writers meet at too
    assert tried > 20
    assert failed == []


def test_the_service_stands_a_little_of_everything():
    tried, failed = service.run(160, 0)
    assert tried > 250
    assert failed == []


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
    monkeypatch.setattr(sys, "argv", ["torture", "--seed", "5", "--state", str(tmp_path / "state.json")])
    with pytest.raises(KeyboardInterrupt):
        torture.main()
    assert json.loads((tmp_path / "state.json").read_text())["done"] == {"some": {"0": [10, 0], "1": [10, 0]}}
    with pytest.raises(SystemExit) as ended:
        torture.main()
    assert calls == [(10, 5), (10, 6), (5, 7)]
    assert ended.value.code == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["in", "all", "25", "1"]
    assert not (tmp_path / "state.json").exists()
