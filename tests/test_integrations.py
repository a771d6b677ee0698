"""Integrations without their libraries: they can be imported, and say what to install when they are used."""

from __future__ import annotations

import sys

import pytest

from dapcal.integrations.libraries import base
from dapcal.integrations.mlflow import load_model, save_model


def test_a_class_of_a_library_that_is_not_there_says_what_to_install():
    class Calibrate(base("Callback", "lightning", "no_such_module", "nor.such")):
        def __init__(self, path: str) -> None:
            super().__init__()
            self.path = path

    with pytest.raises(
        ImportError, match=r"Calibrate needs no_such_module \(No module named 'no_such_module'\)"
    ) as told:
        Calibrate("m.dap")
    assert str(told.value).endswith("; install it with: pip install 'dapcal[lightning]'")


def test_the_first_library_that_is_there_serves():
    assert base("OrderedDict", "lightning", "no_such_module", "collections").__name__ == "OrderedDict"


def test_mlflow_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for call in (lambda: save_model("m.dap", "folder"), lambda: load_model("folder")):
        with pytest.raises(ImportError, match=r"needs MLflow \(.*\); install it with: pip install 'dapcal\[mlflow\]'"):
            call()
