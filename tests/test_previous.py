"""Artefacts of the previous version load, and predict what they predicted."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import dapcal
import previous_cases
from dapcal.models import load
from previous_cases import CORE, FOLDER, asked_rows, expected, inputs


def assert_alike(found, wanted) -> None:
    assert set(wanted) <= set(found)
    for name, values in wanted.items():
        if isinstance(np.ravel(values)[0], str):
            assert list(found[name]) == values
        else:
            np.testing.assert_allclose(np.asarray(found[name]), values, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", CORE)
def test_a_calibrated_posterior(name):
    calibrated = dapcal.load(FOLDER / f"{name}.dap", CORE[name]())
    prediction = calibrated(inputs())
    wanted = expected(name)
    assert_alike({part: getattr(prediction, part) for part in wanted}, wanted)
    assert calibrated.judges is None  # which rows judged was not stored
    assert all(piece.p_value.isnan().all() for piece in prediction.evidence.values())  # nor were pieces of theirs
    assert [bool(reason) for reason in prediction.reasons(alpha=1.0)] == [True] * len(prediction)


def test_a_network():
    model = load(FOLDER / "network.dap", previous_cases.smooth())
    assert model.classes == ("a", "b", "c")
    assert_alike(model.columns(inputs()), expected("network"))


@pytest.mark.parametrize("name", ["table-classification", "table-regression"])
def test_a_table(name):
    model = load(FOLDER / f"{name}.dap")
    found = model.predict(pa.table(asked_rows())).table
    assert_alike(found.to_pydict(), expected(name))
    assert found.column_names == [*expected(name), "reason", "missing", "unusual"]
