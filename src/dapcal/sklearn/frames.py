"""DataFrames as estimators take them: columns that are not plain numbers, as a table of Arrow's."""

from __future__ import annotations

from typing import Any

import numpy as np


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
