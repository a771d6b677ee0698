"""Posteriors of other libraries as dapcal posteriors: one library a file, none of them imported."""

from dapcal.adapters import (
    bayesian_torch,
    estimators,
    laplace_torch,
    modules,
    posteriors_library,
    sample_dicts,
    tree_arrays,
)

__all__ = [
    "bayesian_torch", "estimators", "laplace_torch", "modules", "posteriors_library", "sample_dicts", "tree_arrays",
]  # fmt: skip
