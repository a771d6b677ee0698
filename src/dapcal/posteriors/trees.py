"""Draws that are trees, or sums of trees: a forest or boosting models, stored as arrays."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dapcal.likelihoods import Likelihood
from dapcal.networks.forests import Forest, Link
from dapcal.storing import Stores


@dataclass(frozen=True, eq=False)
class TreePosterior:
    """A posterior whose draws are trees.

    Distances are measured between inputs, as there is no network to take features from.

    Attributes:
        forest: the trees of all draws.
        likelihood: p(y | outputs): of classes, whose outputs are log probabilities, or of numbers.
        link: what the sums are: numbers, probabilities of classes, or their logits.
        smoothing: share of a uniform distribution that is mixed into probabilities, as a tree's may be 0.
    """

    stores = Stores(given={"likelihood": "likelihood"})

    forest: Forest
    likelihood: Likelihood
    link: Link
    smoothing: float

    gaussian: None = None
    prior: None = None
    network: None = None
    squared_norms: None = None

    def __post_init__(self) -> None:
        if not 0 < self.smoothing < 1:
            raise ValueError(f"Expected `smoothing` between 0 and 1, got {self.smoothing}")

    @property
    def count(self) -> int:
        """S."""
        return len(self.forest.start)

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs of all draws, (S, N, C)."""
        if self.link == "numbers":
            return self.forest(x).to(x)
        p = self.probabilities(x)
        return ((1 - self.smoothing) * p + self.smoothing / p.shape[-1]).log().to(x)

    def probabilities(self, x: Tensor) -> Tensor:
        """Of classes, by every draw, as the estimators themselves say them, (S, N, C)."""
        sums = self.forest(x)
        return sums.softmax(-1) if self.link == "logits" else sums

    def moments(self, x: Tensor, moving: bool = False) -> None:  # noqa: ARG002
        """None: draws are all there is."""
        return

    def check(self) -> None:
        """Refuse arrays that do not go together, as a file may hold them."""
        self.forest.check()
        if self.link == "probabilities" and min(float(self.forest.value.min()), float(self.forest.start.min())) < 0:
            raise ValueError("its trees have a probability below 0")
