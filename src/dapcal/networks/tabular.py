"""A network for the columns of a table: numbers through piecewise-linear embeddings, then scaled layers.

x ──► numbers: squashed, and their place between bin edges ──► vector each ─┐
  └─► other inputs (0/1) as they are ───────────────────────────────────────┴─► scaled layers ──► outputs

It is one member of TabM (Gorishniy, Kotelnikov, Babenko 2025, arXiv:2410.24210): members have scales, biases and a last
layer of their own (`is_own`) and share all else, as `dapcal.posteriors.sharing` trains them. Embeddings: Gorishniy,
Rubachev, Babenko (2022), arXiv:2203.05556, in TabM's form, which starts linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

SQUASHED = 3.0  # standard deviations that a number tends to, however large it is
ORDINARY = 2.0  # standard deviations up to which a number is not tempered


class Tempered(nn.Module):
    """Numbers that beyond `ORDINARY` standard deviations grow as their logarithm does; others stay as they are.

    A network is a line far away. Of logarithms it is a power of the number then, and not an exponential.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        beyond = (x.abs() - ORDINARY).clamp_min(0)
        return x + x.sign() * (beyond.log1p() - beyond)


class PiecewiseLinear(nn.Module):
    """Numbers (N, F) as vectors (N, F · width): linear in the squashed number and in its place between bin edges.

    The place is one number a bin: 0 below the bin, 1 above it, linear inside. Far away the vector is bounded.

    Args:
        numbers: F.
        bins: at most, of a number.
        width: of the vector.
    """

    slope: Tensor
    shift: Tensor

    def __init__(self, numbers: int, bins: int, width: int) -> None:
        super().__init__()
        self.register_buffer("slope", torch.zeros(numbers, bins))
        self.register_buffer("shift", torch.zeros(numbers, bins))
        bound = width**-0.5
        self.linear = nn.Parameter(torch.empty(numbers, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(numbers, width).uniform_(-bound, bound))
        self.pieces = nn.Parameter(torch.zeros(numbers, bins, width))

    def between(self, edges: Sequence[Tensor]) -> None:
        """Take the edges of every number's bins, ascending; a number with fewer than two has no bins."""
        for buffer in (self.slope, self.shift):
            buffer.zero_()
        for place, own in enumerate(edges):
            width = own.diff()  # (bins,)
            self.slope[place, : len(width)] = 1 / width
            self.shift[place, : len(width)] = -own[:-1] / width

    def forward(self, x: Tensor) -> Tensor:
        """Vectors, (N, F · width)."""
        squashed = x / (1 + (x / SQUASHED).square()).sqrt()
        places = torch.addcmul(self.shift, self.slope, x[..., None]).clamp(0, 1)  # (N, F, bins)
        pieces = torch.bmm(places.transpose(0, 1), self.pieces).transpose(0, 1)  # (N, F, width)
        return (torch.addcmul(self.bias, self.linear, squashed[..., None]) + pieces).flatten(1)


class Scaled(nn.Module):
    """A linear layer with scales of its inputs and outputs: s · (W (r · x)) + b."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(inputs))
        self.shared = nn.Linear(inputs, outputs, bias=False)
        self.after = nn.Parameter(torch.ones(outputs))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-(inputs**-0.5), inputs**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        """(N, outputs)."""
        return torch.addcmul(self.bias, self.after, self.shared(x * self.before))


class TableNetwork(nn.Module):
    """One member; see the top of this file.

    Args:
        inputs: P.
        outputs: C.
        hidden: widths of the hidden layers.
        numbers: F inputs that are numbers; the others are 0 or 1, as a rule.
        bins: at most, of a number.
        width: of a number's vector.
        dropout: rate after every hidden layer, in training.
    """

    numbers: Tensor
    others: Tensor

    def __init__(
        self, inputs: int, outputs: int, hidden: Sequence[int], numbers: int, bins: int, width: int, dropout: float
    ) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.arange(numbers))
        self.register_buffer("others", torch.arange(numbers, inputs))
        self.embedding = PiecewiseLinear(numbers, bins, width) if numbers else None
        self.layers = nn.Sequential()
        for before, after in pairwise((numbers * width + inputs - numbers, *hidden)):
            self.layers.extend([Scaled(before, after), nn.ReLU(), nn.Dropout(dropout)])
        # the members differ from the start by how they weigh the inputs, each number's vector as a whole
        scales = torch.cat([torch.randn(numbers).repeat_interleave(width), torch.randn(inputs - numbers)])
        first = self.layers[0]
        assert isinstance(first, Scaled)
        first.before = nn.Parameter(scales)
        self.head = nn.Linear(hidden[-1], outputs)

    @staticmethod
    def is_own(name: str) -> bool:
        """Whether a parameter of that name belongs to a member; the others are shared."""
        return name.startswith("head.") or (name.startswith("layers.") and ".shared." not in name)

    def fit_inputs(self, numbers: Tensor, edges: Sequence[Tensor]) -> None:
        """Which inputs are numbers, ascending (F,), and the edges of their bins."""
        is_other = torch.ones(len(self.numbers) + len(self.others), dtype=torch.bool)
        is_other[numbers] = False
        self.numbers.copy_(numbers)
        self.others.copy_(is_other.nonzero().flatten())
        if self.embedding is not None:
            self.embedding.between(edges)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N, C)."""
        others = x.index_select(1, self.others)
        if self.embedding is None:
            return self.head(self.layers(others))
        embedded = self.embedding(x.index_select(1, self.numbers))
        return self.head(self.layers(torch.cat([embedded, others], 1)))
