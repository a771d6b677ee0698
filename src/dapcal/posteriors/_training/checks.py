"""What every fit checks first: that it was given a network and a likelihood."""

from __future__ import annotations

from torch import nn

from dapcal.likelihoods import Likelihood


def check(model: object, likelihood: object) -> None:
    """Refuse what is not a network or not a likelihood, before anything is read or trained."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected `model` as an nn.Module, got {_named(model)}")
    if not isinstance(likelihood, Likelihood):
        raise TypeError(
            f"Expected `likelihood` as e.g. dapcal.likelihoods.Categorical() or dapcal.likelihoods.Gaussian(), got "
            f"{_named(likelihood)}"
        )


def _named(value: object) -> str:
    return f"the class {value.__name__}; add ()" if isinstance(value, type) else repr(value)[:60]
