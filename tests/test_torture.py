"""A small share of `make torture`, and how it goes on after an interruption."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from dapcal.files import write_text
from torture import __main__ as torture
from torture import jobs, kills, nodes, numerics, service, states, validity, writers
from torture.jobs import Job, Known
from torture.tally import Tally


def test_a_few_kills_leave_no_file_half_or_mixed():
    tally = kills.run(1, 1)  # a command, which writers meet at too
    assert tally.tried > 20
    assert tally.failed == []


def test_the_service_stands_a_little_of_everything():
    tally = service.run(160, 0)
    assert tally.tried > 250
    assert tally.failed == []


def test_files_say_what_was_saved_last_in_any_order_of_steps():
    tally = states.run(3, 0)
    assert tally.tried > 20
    assert tally.failed == []


def test_numbers_of_any_size_are_refused_or_predicted_sanely():
    assert numerics.run(10, 0) == Tally("numerics", 10)


def test_promises_are_kept_over_refits():
    tally = validity.run(4, 0)
    assert tally.tried == 11  # refits, and promises of classes and numbers
    assert tally.failed == []


def test_a_broken_promise_is_noticed():
    tally = Tally("validity")
    validity.judge({"classes: 0.1 flagged": [0.2, 0.21, 0.19], "numbers: 0.05 outside": [0.05, 0.04, 0.06]}, tally)
    assert tally.tried == 2
    assert tally.failed == ["validity: classes: 0.1 flagged: 0.2000 ± 0.0047 over 3 refits"]


def test_an_interrupted_run_goes_on_and_the_table_counts_all(tmp_path: Path, monkeypatch, capsys):
    calls: list[tuple[int, int]] = []

    def run(count: int, seed: int) -> Tally:
        if len(calls) == 2 and (count, seed) not in calls and "stop" not in monkeypatched:
            monkeypatched.append("stop")
            raise KeyboardInterrupt
        calls.append((count, seed))
        tally = Tally("some", count, ["something"] * (seed == 7))
        tally.skip("no such disk", 2)
        tally.measured["growth"] = 100 / seed
        return tally

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
    said = capsys.readouterr().out
    assert "  NOT TRIED (2): no such disk\n  5 tried, 1 failed, 2 not tried, 0 s\n  growth: 14.29" in said
    assert said.splitlines()[-1].split() == ["in", "all", "25", "1", "6"]
    record = json.loads(out.read_text())
    counts = {"tried": 25, "failed": 1, "seconds": 0, "skipped": {"no such disk": 6}, "measured": {"growth": 20.0}}
    assert record["parts"] == {"some": counts}
    assert record["experiment"] == "torture"  # as every result file says what it is of
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
    assert capsys.readouterr().out.splitlines()[-1].split() == ["in", "all", "4", "0", "0"]


def test_a_file_of_before_is_read_and_gone_on_from(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(torture, "PARTS", (torture.Part("numerics", 4, 4, 2),))
    out = tmp_path / "found.json"
    kind = {"quick": False, "seed": 0}
    out.write_text(json.dumps({"kind": kind, "pieces": {"numerics": {"0": [700, 3, 60, "0123456789ab"]}}}))
    monkeypatch.setattr(sys, "argv", ["torture", "--out", str(out)])
    with pytest.raises(SystemExit):
        torture.main()
    assert capsys.readouterr().out.splitlines()[-1].split() == ["in", "all", "702", "3", "0"]
    found = json.loads(out.read_text())
    assert found["commits"][0] == "0123456789ab"
    assert found["parts"]["numerics"]["tried"] == 702


def test_what_cannot_be_tried_here_is_neither_tried_nor_failed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(nodes, "find_spec", lambda _: None)
    assert nodes.run(10, 0) == Tally("nodes", skipped=Counter({"the extra `ray` is not installed": 30}))
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(writers.ctypes, "CDLL", lambda _: SimpleNamespace())  # as where there is no capset
    job, tally = Job("save", ("save", "nothing.dap", "{out}/s.dap"), ("s.dap",)), Tally("kills")
    writers.read_only(job, Known({}, {"s.dap": b"before"}), writers.fresh(tmp_path / "out"), tally)
    assert (tally.tried, tally.failed, tally.skipped.total()) == (0, [], 2)


def test_a_flood_needs_files_and_takes_those_that_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tally = Tally("service")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        service.flood(None, tally)  # asks nobody
        with service.many_files():
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(service.FILES, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (tally.tried, tally.failed, tally.skipped.total()) == (0, [], 2)


@pytest.mark.parametrize(("word", "failures"), [("write", 0), ("end", 2)])
def test_a_full_disk_is_met_by_who_writes_and_who_does_not_is_noticed(word, failures, tmp_path: Path, monkeypatch):
    def work(words: list[str]) -> None:
        try:
            if words == ["write"]:
                write_text(tmp_path / "out" / "o.txt", "new")
        except OSError as error:
            print(error, file=sys.stderr)
            raise SystemExit(2) from None

    monkeypatch.setattr(jobs, "work", work)
    job, known, tally = Job(word, (word,), ("o.txt",)), Known({"o.txt": b"new"}, {"o.txt": b"before"}), Tally("kills")
    writers.against(job, known, writers.full, "a full disk", writers.fresh(tmp_path / "out"), tally, must_stop=True)
    assert len(tally.failed) == failures, tally.failed
