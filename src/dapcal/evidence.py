"""Pieces of evidence that an input is out of distribution, each by name, and the one that a flag is put down to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

DOUBT = "doubt"
"""Name of the piece that is not a distance: predictive entropy, in regression the log epistemic variance."""


COLUMNS = "columns"
"""Name of the piece that looks at a table column by column."""


class Piece(NamedTuple):
    """One piece of evidence at N inputs."""

    standardised: Tensor  # (N,) (value − median)/(95 % quantile − median), both of held-out inputs
    p_value: Tensor  # (N,) in float64, conformal, valid by itself; NaN in files of earlier versions


def leading(evidence: Mapping[str, Piece]) -> list[str]:
    """The name of each input's most unusual piece: that of the smallest p-value, of equal ones the most standardised.

    An explanation and not a test: the smallest of several p-values is not a p-value. Without p-values (files of earlier
    versions) the largest standardised value decides.
    """
    names = list(evidence)
    standardised = torch.stack([piece.standardised for piece in evidence.values()])  # (M, N)
    p_value = torch.stack([piece.p_value for piece in evidence.values()]).nan_to_num(1.0)
    smallest = p_value == p_value.amin(0)
    return [names[place] for place in standardised.where(smallest, -torch.inf).argmax(0).tolist()]


def in_words(piece: str, is_classification: bool) -> str:
    """What a flag says that is put down to a piece.

    >>> in_words("doubt", is_classification=True), in_words("features", is_classification=True)
    ('ambiguous', 'far from the training data (features)')
    """
    if piece == DOUBT:
        return "ambiguous" if is_classification else "uncertain (the draws disagree)"
    if piece == COLUMNS:
        return "unusual columns"
    return f"far from the training data ({piece})"
