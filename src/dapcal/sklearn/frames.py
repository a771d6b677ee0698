"""DataFrames as estimators take them: columns that are not plain numbers, as a table of Arrow's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pandas import DataFrame


def is_mixed(X: Any) -> bool:
    """Whether X is a DataFrame with columns that are not plain numbers, or with missing cells."""
    if not (hasattr(X, "iloc") and hasattr(X, "dtypes") and hasattr(X, "columns")):
        return False
    plain = all(isinstance(kind, np.dtype) and kind.kind in "biuf" for kind in X.dtypes)
    return len(X) > 0 and X.shape[1] > 0 and (not plain or bool(X.isna().to_numpy().any()))


def as_table(X: Any) -> Any:
    """A DataFrame as a table of Arrow's, without its index."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ImportError(
            "DataFrames with texts need pyarrow; install it with: pip install 'dapcal[tables]'"
        ) from error
    return pa.Table.from_pandas(X, preserve_index=False)


def index_of(X: Any) -> Any:
    """Labels of the rows of a DataFrame; None where there are none."""
    return X.index if hasattr(X, "iloc") else None


def as_frame(columns: dict[str, Any], X: Any, wanted: str) -> DataFrame:
    """Columns with the index of X; `wanted` is what errors say needs pandas."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(f"{wanted} needs pandas; install it with: pip install pandas") from error
    return pandas.DataFrame(columns, index=index_of(X))


@contextmanager
def advised() -> Iterator[None]:
    """Where an array holds texts, which only a DataFrame may, say how it stays one."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("could not convert string to float"):
            raise
        raise ValueError(
            f"{error}; give texts as columns of a DataFrame, which transformers before this one keep with "
            'set_output(transform="pandas")'
        ) from error
