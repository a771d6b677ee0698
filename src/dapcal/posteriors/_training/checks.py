"""What every fit checks first: that it was given a network and a likelihood, and that these go together."""

from __future__ import annotations

from torch import nn

from dapcal.likelihoods import Bernoulli, Categorical, Likelihood, MultiLabel


def check(model: object, likelihood: object) -> None:
    """Refuse what is not a network or not a likelihood, or not made for it, before anything is read or trained."""
    check_network(model)
    check_likelihood(likelihood)
    last = model
    while isinstance(last, nn.Sequential) and len(last):
        last = last[-1]
    if isinstance(last, nn.Softmax | nn.Sigmoid) and isinstance(likelihood, Categorical | Bernoulli | MultiLabel):
        raise ValueError(
            f"Expected a network that ends in logits, got one that ends in {type(last).__name__}; leave that layer "
            f"out, {type(likelihood).__name__}() makes probabilities itself"
        )


def check_network(model: object) -> None:
    """Refuse what is not a network."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected `model` as an nn.Module, got {_named(model)}")


def check_likelihood(likelihood: object) -> None:
    """Refuse what is not a likelihood."""
    if not isinstance(likelihood, Likelihood):
        raise TypeError(
            f"Expected `likelihood` as e.g. dapcal.likelihoods.Categorical() or dapcal.likelihoods.Gaussian(), got "
            f"{_named(likelihood)}"
        )


def _named(value: object) -> str:
    return f"the class {value.__name__}; add ()" if isinstance(value, type) else repr(value)[:60]
