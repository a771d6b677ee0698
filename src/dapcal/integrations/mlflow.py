"""An MLflow flavour: a folder that holds the artefact as it is, and any MLflow tool predicts from; nothing is pickled.

In use:

    dapcal.integrations.mlflow.save_model("house.dap", "house-mlflow")              # what `dapcal fit` wrote
    mlflow.pyfunc.load_model("house-mlflow").predict(frame)                         # a data frame of predictions
    save_model("net.dap", "net-mlflow", factory="nets:make", code_paths=["nets.py"])  # of your network

MLflow puts the code of the folder on Python's path, and the factory is imported from there: load what you trust.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

import dapcal
from dapcal import artifact, models
from dapcal.models import Model, arrays
from dapcal.models.columns import flat
from dapcal.models.model import NETWORK
from dapcal.models.table import TableModel
from dapcal.models.text import TextModel
from dapcal.records import ALPHA, LEVEL

if TYPE_CHECKING:
    import pandas as pd


def save_model(
    model: str | Path,
    path: str | Path,
    *,
    factory: str | None = None,
    code_paths: Sequence[str | Path] = (),
    alpha: float = ALPHA,
    level: float = LEVEL,
    **options: Any,
) -> None:
    """Write an MLflow model.

    Args:
        model: the artefact: what `dapcal fit` or `dapcal calibrate` wrote, or a callback or `Model.save`.
        path: of the folder, which must not exist.
        factory: of a network's model, package.module:factory.
        code_paths: files or folders with the factory's code, which are copied.
        alpha: inputs with a p-value up to this are out of distribution.
        level: probability that an interval holds the target.
        options: further arguments of `mlflow.pyfunc.save_model`, e.g. `signature`.
    """
    _library().pyfunc.save_model(path=str(path), **_described(model, factory, code_paths, alpha, level), **options)


def log_model(
    model: str | Path,
    name: str,
    *,
    factory: str | None = None,
    code_paths: Sequence[str | Path] = (),
    alpha: float = ALPHA,
    level: float = LEVEL,
    **options: Any,
) -> Any:
    """The same into the current run of MLflow; `options` are those of `mlflow.pyfunc.log_model`."""
    return _library().pyfunc.log_model(name=name, **_described(model, factory, code_paths, alpha, level), **options)


def load_model(uri: str | Path, device: str = "cpu") -> Model:
    """The model itself (`dapcal.models.Model`), with all that dapcal knows of it."""
    loaded = _library().pyfunc.load_model(str(uri), model_config={"device": device})
    if loaded.metadata.flavors["python_function"].get("loader_module") != __name__:
        raise ValueError(f"{uri} is not a model of dapcal's; load it with mlflow.pyfunc.load_model")
    return loaded.get_raw_model()


@dataclass(frozen=True, eq=False)
class Predictor:
    """What MLflow calls: data in, a data frame of predictions out, a row for a row."""

    model: Model
    alpha: float = ALPHA
    level: float = LEVEL

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Predictions by name, as `dapcal predict` writes them.

        Args:
            data: of a table or texts, a data frame with its columns; of a network, an array (N, ...) or {"x": array}.
            params: `alpha` and `level`, for this call.
        """
        import pandas as pd

        asked = {"alpha": self.alpha, "level": self.level, **(params or {})}
        if unknown := sorted(set(asked) - {"alpha", "level"}):
            raise ValueError(f"Expected `params` named alpha or level, got {', '.join(unknown)}")
        level, alpha = float(asked["level"]), float(asked["alpha"])
        if isinstance(self.model, TableModel):
            if not isinstance(data, pd.DataFrame):
                raise TypeError(f"Expected a data frame with the columns of the table, got {type(data).__name__}")
            rows = pa.Table.from_pandas(data, preserve_index=False)
            return self.model.predict(rows, level=level, alpha=alpha).table.to_pandas()
        if isinstance(self.model, TextModel):
            if not isinstance(data, pd.DataFrame) or self.model.text not in data:
                raise TypeError(f"Expected a data frame with the column `{self.model.text}`, got {type(data).__name__}")
            texts = self.model.encode([{self.model.text: str(one)} for one in data[self.model.text]])
            return pd.DataFrame(flat(self.model.columns(texts, level=level, alpha=alpha), self.model.classes))
        values = data["x"] if isinstance(data, Mapping) and set(data) == {"x"} else data
        if not isinstance(values, np.ndarray):
            raise TypeError(f'Expected an array (N, ...) or {{"x": array}}, got {type(values).__name__}')
        x = arrays.as_inputs(values, torch.get_default_dtype(), "data")
        return pd.DataFrame(flat(self.model.columns(x, level=level, alpha=alpha), self.model.classes))

    def get_raw_model(self) -> Model:
        """The model itself; MLflow asks for it by this name."""
        return self.model


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> Predictor:
    """What MLflow asks of a loader module; `path` is that of the artefact."""
    config = dict(model_config or {})
    model = models.load(path, config.get("factory"), config.get("device", "cpu"))
    return Predictor(model, config.get("alpha", ALPHA), config.get("level", LEVEL))


def _described(
    model: str | Path, factory: str | None, code_paths: Sequence[str | Path], alpha: float, level: float
) -> dict[str, Any]:
    """Arguments of `mlflow.pyfunc` for an artefact that was opened and found to be whole."""
    kind = artifact.open(model).about.get("kind")
    if kind is None:
        raise ValueError(
            f"{model} does not say what its inputs are; write it with `dapcal calibrate`, a callback of "
            "dapcal.integrations or NetworkModel.save (dapcal.models.network_fitting.model_of)"
        )
    if kind != NETWORK and factory is not None:
        raise ValueError(f"{model} is a model of tables or texts and needs no `factory`; leave it out")
    if kind == NETWORK and factory is None:
        raise ValueError(f"{model} holds no code: name what makes its network with `factory`, e.g. nets:make")
    config = {"alpha": alpha, "level": level, "device": "cpu", **({"factory": factory} if factory else {})}
    return {
        "loader_module": __name__,
        "data_path": str(model),
        "code_paths": [str(code) for code in code_paths] or None,
        "model_config": config,
        # named, as MLflow would find them out by loading the model in a process of its own
        "pip_requirements": [f"dapcal=={dapcal.__version__}", f"torch=={torch.__version__.partition('+')[0]}"],
    }


def _library() -> Any:
    try:
        import mlflow
        import mlflow.pyfunc
    except ImportError as error:
        raise ImportError(f"This needs MLflow ({error}); install it with: pip install 'dapcal[mlflow]'") from error
    return mlflow
