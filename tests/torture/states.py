"""Any order of calibrating, saving, loading, damaging and predicting: files say what was saved last, or are refused.

`run(count, seed)` lets hypothesis try `count` orders of at most `STEPS` steps. By hand: `python tests/torture/states.py
20 0`.
"""

from __future__ import annotations

import errno
import os
import random
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import ClassVar
from unittest import mock

import hypothesis
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import artefacts

import dapcal
import previous_cases
from dapcal.adjust import Inflate, Reweight, Transport, Unchanged
from dapcal.likelihoods import Categorical
from dapcal.posteriors import ensemble, laplace, variational
from dapcal.types import Posterior
from torture.tally import Tally

STEPS = 12
NAMES = st.sampled_from(["a.dap", "b.dap"])
KINDS = ("ensemble", "last layer", "variational")
ADJUSTMENTS = {"inflate": Inflate, "reweight": Reweight, "transport": Transport, "unchanged": Unchanged}


def run(count: int, seed: int = 0) -> Tally:
    """Try `count` orders; how many steps were taken, and what failed."""
    Orders.tally = Tally("states")
    settings = hypothesis.settings(
        max_examples=count, stateful_step_count=STEPS, deadline=None, database=None, print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    try:
        with warnings.catch_warnings(action="ignore"):
            run_state_machine_as_test(hypothesis.seed(seed)(Orders), settings=settings)
    except Exception as error:
        steps = " ".join(getattr(error, "__notes__", ()))
        Orders.tally.check(False, f"seed {seed}, {type(error).__name__}: {error} {steps}")
    return Orders.tally


class Orders(RuleBasedStateMachine):
    """A model in memory and two files, with what each must say."""

    tally: ClassVar[Tally]

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.model: dapcal.Calibrated | None = None
        self.said: Tensor | None = None  # by the model
        self.files: dict[str, Tensor] = {}  # what they must predict
        self.damaged: set[str] = set()  # those that may be refused

    @rule(kind=st.sampled_from(KINDS), adjust=st.sampled_from(sorted(ADJUSTMENTS)), seed=st.integers(0, 3))
    def calibrate(self, kind: str, adjust: str, seed: int) -> None:
        """Another model; what makes no sense together is refused, and the model stays."""
        x, y = previous_cases._classes(60, 1 + seed)
        try:
            made = dapcal.calibrate(
                _posterior(kind), train=previous_cases._classes(60, 0), held_out=(x, y), adjust=ADJUSTMENTS[adjust](),
                candidates=3, seed=seed,
            )  # fmt: skip
        except ValueError as error:
            self._counted("\n" not in str(error), f"not one sentence: {error}")
            return
        self.model, self.said = made, _numbers(made)
        self._counted(bool(self.said.isfinite().all()), f"{kind}, {adjust}: not finite")

    @precondition(lambda self: self.model is not None)
    @rule(rows=st.permutations(range(8)), size=st.integers(1, 8))
    def predict(self, rows: list[int], size: int) -> None:
        """In any order and in batches of any size it is the same, and a prediction changes nothing."""
        assert self.model is not None
        x = previous_cases.inputs()
        parts = [self.model(batch).ood_p_value for batch in x[rows].split(size)]
        found = torch.cat(parts)
        whole = self.model(x).ood_p_value[rows]
        self._counted(torch.allclose(found, whole, atol=0.02), f"p-values {found.tolist()}, in one {whole.tolist()}")
        self._counted(torch.equal(_numbers(self.model), self._known()), "predicting changed the model")

    @precondition(lambda self: self.model is not None)
    @rule(name=NAMES)
    def save(self, name: str) -> None:
        """Over whatever was there."""
        assert self.model is not None
        self.model.save(self._path(name))
        self.files[name] = self._known()
        self.damaged.discard(name)
        self._counted(True, "")

    @precondition(lambda self: self.model is not None)
    @rule(name=NAMES, call=st.sampled_from(["fsync", "replace"]))
    def save_on_a_full_disk(self, name: str, call: str) -> None:
        """An OSError, and the file is as it was."""
        assert self.model is not None
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            with mock.patch.object(os, call, side_effect=full):
                self.model.save(self._path(name))
            self._counted(False, f"saved in spite of a full disk at {call}")
        except OSError:
            self._counted(self._path(name).exists() == (name in self.files), f"{name} came or went at {call}")

    @precondition(lambda self: self.files)
    @rule(name=NAMES)
    def load(self, name: str) -> None:
        """The file becomes the model."""
        if name not in self.files or name in self.damaged:
            return
        self.model = dapcal.load(self._path(name), previous_cases.smooth())
        self.said = _numbers(self.model)
        self._counted(torch.equal(self._known(), self.files[name]), f"{name} predicts something else than was saved")

    @precondition(lambda self: self.files)
    @rule(name=NAMES, seed=st.integers(0, 10**6))
    def damage(self, name: str, seed: int) -> None:
        """From now on it is refused, or says the same, until it is saved again."""
        if name in self.files and name not in self.damaged:
            draw, content = random.Random(seed), self._path(name).read_bytes()
            self._path(name).write_bytes(draw.choice(artefacts.BEHIND)(content, draw))
            self.damaged.add(name)
            self._counted(True, "")

    @invariant()
    def files_say_what_they_must(self) -> None:
        """Whole ones what was saved last, damaged ones that or nothing."""
        for name, must in self.files.items():
            try:
                found = _numbers(dapcal.load(self._path(name), previous_cases.smooth()))
            except (ValueError, OSError) as error:
                self._counted(name in self.damaged, f"{name} is whole and was refused: {error}")
            else:
                self._counted(torch.equal(found, must), f"{name} predicts something else than was saved")

    def teardown(self) -> None:
        """Away with the files."""
        self.folder.cleanup()

    def _path(self, name: str) -> Path:
        return Path(self.folder.name) / name

    def _known(self) -> Tensor:
        assert self.said is not None
        return self.said

    def _counted(self, is_right: bool, what: str) -> None:
        self.tally.tried += 1
        assert is_right, what  # hypothesis makes the order short


@cache
def _posterior(kind: str) -> Posterior:
    torch.manual_seed(0)
    train = previous_cases._classes(60, 0)
    members = ensemble.fit(previous_cases.smooth, Categorical(), train, members=3, epochs=20, batch_size=20)
    if kind == "ensemble":
        return members
    if kind == "last layer":
        return laplace.last_layer(members.network, Categorical(), train, draws=8)
    return variational.fit(previous_cases.smooth(), Categorical(), train, draws=8, epochs=20, batch_size=20)


def _numbers(calibrated: dapcal.Calibrated) -> Tensor:
    found = calibrated(previous_cases.inputs())
    return torch.cat([found.mean.flatten().double(), found.variance.double(), found.ood_p_value])


if __name__ == "__main__":
    found = run(int(sys.argv[1]), int(sys.argv[2]))
    print("\n".join(found.failed))
    print(f"tried {found.tried}, failed {len(found.failed)}")
