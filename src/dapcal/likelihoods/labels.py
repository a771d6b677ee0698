"""The likelihood of several labels that may each be there or not, independently of each other given the input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from dapcal.likelihoods.base import Decisions, Likelihood
from dapcal.likelihoods.classes import tempered, whole
from dapcal.records import Conditional, Ensemble
from dapcal.storing import Stores


@dataclass(frozen=True)
class MultiLabel(Likelihood):
    """L labels, none, one or several of which an input has; outputs are their logits (N, L), targets 0 and 1 (N, L).

    Each label is a `Bernoulli` of its own, with its own spread: the predictive mean (N, L) is the probability that the
    label is there, `log_prob` sums over labels, and far from the data every probability tends to 1/2. An input counts
    as wrong where any of its labels is.
    """

    stores = Stores()
    task = "multi-label"

    temperature: float = 1.0

    def conditional(self, outputs: Tensor) -> Conditional:
        """Probabilities p and variances p (1 − p) of the labels, (S, N, L), and the sum of their entropies."""
        z = outputs.double() / self.temperature
        p, q = torch.sigmoid(z), torch.sigmoid(-z)
        return Conditional(p, p * q, (p * softplus(-z) + q * softplus(z)).sum(-1))

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Σ_l log σ(± logit)."""
        return logsigmoid(self._signed(outputs, y)).sum(-1)

    def log_both(self, ensemble: Ensemble) -> Tensor:
        """log of the predictive probabilities that a label is not there, and that it is, (N, L, 2), as Bernoulli's."""
        z = ensemble.outputs.double() / self.temperature
        both = torch.sigmoid(torch.stack([-z, z], -1))  # 1 − p would round to 0 where p is almost 1
        top = ensemble.log_weights.max(0).values
        mass = (ensemble.log_weights - top).exp()
        mean = torch.einsum("sn,snlk->nlk", mass, both).clamp_min(torch.finfo(mass.dtype).tiny)
        return tempered(top[:, None, None] + mean.log(), ensemble.spread[..., None])

    def mean(self, ensemble: Ensemble) -> Tensor:
        """Predictive probability of every label, (N, L)."""
        return self.log_both(ensemble)[..., 1].exp()

    def probabilities(self, ensemble: Ensemble) -> Tensor:
        """The mean."""
        return self.mean(ensemble)

    def confidence(self, mean: Tensor) -> Tensor:
        """In what is more likely of a label, that it is there or not, averaged over labels."""
        return torch.maximum(mean, 1 - mean).mean(-1)

    def decisions(self, mean: Tensor, y: Tensor) -> Decisions:
        """One for every input and label, input by input; the paper's weights may make a mean above 1."""
        p = mean.clamp(0, 1)
        return Decisions(torch.stack([1 - p, p], -1).flatten(0, 1), y.flatten())

    def variance(self, ensemble: Ensemble) -> Tensor:
        """p̄ (1 − p̄), (N, L)."""
        mean = self.mean(ensemble)
        return mean - mean**2

    def entropy(self, ensemble: Ensemble) -> Tensor:
        """Sum of the labels' entropies, each at least 0, (N,)."""
        log_p = self.log_both(ensemble)
        return -(log_p.exp() * log_p).sum(-1).clamp_max(0).sum(-1)

    def log_prob(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """Σ_l log p̄_l[y_l], (N,): each label by its own predictive mean."""
        return self.log_both(ensemble).gather(-1, y[..., None]).squeeze(-1).sum(-1)

    def log_prob_mixture(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """log Σ_s w_s Π_l p(y_l | θ_s), every draw tempered by the spread: labels depend on each other by the draw."""
        softer = (1 + torch.pi / 8 * ensemble.spread).sqrt()  # (N, L)
        density = logsigmoid(self._signed(ensemble.outputs.double(), y) / softer).sum(-1)
        return torch.logsumexp(ensemble.log_weights + density, 0)

    def error(self, base: Ensemble, y: Tensor) -> Tensor:
        """Whether any label is wrong."""
        return (self._there(base) != y).any(-1)

    def expected_rise(self, base: Ensemble, ensemble: Ensemble) -> Tensor:
        """Summed over labels."""
        log_p = self.log_both(base)
        return (log_p.exp() * (log_p - self.log_both(ensemble))).sum(-1).sum(-1)

    def doubt(self, base: Ensemble) -> Tensor:
        """Entropy."""
        return self.entropy(base)

    def most_uncertain(self, ensemble: Ensemble) -> float:  # noqa: ARG002
        """1/2 for every label."""
        return 0.5

    def aimed_at(self, ensemble: Ensemble, base: Ensemble) -> Tensor:  # noqa: ARG002
        """The predictive probabilities."""
        return self.mean(ensemble)

    def rescaled(self, factor: float) -> MultiLabel:
        """Logits divided by a further temperature, one for all labels."""
        return replace(self, temperature=self.temperature * factor)

    def locations(self, outputs: Tensor) -> Tensor:
        """Half of every logit, as Bernoulli has it."""
        return outputs / 2

    def spread(self, variance: Tensor) -> Tensor:
        """Variance of tempered logits, label by label."""
        return variance / self.temperature**2

    def closed_spread(self, variance: Tensor, outputs: int) -> Tensor:  # noqa: ARG002
        """Four times that of the halves: the variance of the logit, as MacKay's approximation has it."""
        return 4 * self.spread(variance)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """√(p (1 − p)) over temperature, on the diagonal: given the outputs labels are independent."""
        z = outputs / self.temperature
        return torch.diag_embed((torch.sigmoid(z) * torch.sigmoid(-z)).sqrt()) / self.temperature

    def columns(self, ensemble: Ensemble, base: Ensemble, level: float) -> dict[str, Tensor]:  # noqa: ARG002
        """Whether each label is rather there (0 or 1), its probability, and the parts of p̄ (1 − p̄), (N, L) each."""
        parts = self.split(ensemble, base)
        return {
            "prediction": self._there(ensemble),
            "probability": self.mean(ensemble),
            "epistemic": parts.epistemic,
            "aleatoric": parts.aleatoric,
        }

    def sample(self, ensemble: Ensemble, n: int, generator: torch.Generator) -> Tensor:
        """Labels 0 and 1, (n, N, L), each drawn by its own predictive mean."""
        mean = self.mean(ensemble)
        uniform = torch.rand(n, *mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
        return (uniform < mean).long()

    def check_held_out(self, y: Tensor, held_out: Tensor) -> None:
        """A label that is there in held-out data is there in training, too."""
        unknown = torch.nonzero(held_out.any(0) & ~y.any(0)).flatten().tolist()
        if unknown:
            raise ValueError(
                f"Labels {unknown} are 1 in `held_out` but never in `train`; train on them, or drop those rows"
            )

    def check(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Zeros and ones (N, L)."""
        n, labels = outputs.shape[-2:]
        y = y[:, None] if labels == 1 and y.ndim == 1 else y
        if y.shape != (n, labels):
            one = "; for one class an input use Categorical()" if y.shape in ((n,), (n, 1)) else ""
            raise ValueError(
                f"Expected labels of shape ({n}, {labels}), a 0 or 1 for every output, got {tuple(y.shape)}{one}"
            )
        if y.is_floating_point() and bool(((y > 0) & (y < 1)).any()):
            raise ValueError(
                "Expected labels 0 and 1, got soft labels between them; use (y > 0.5).long(), or draw them with "
                "torch.bernoulli(y)"
            )
        y = whole(y, "labels")
        if bool(((y != 0) & (y != 1)).any()):
            raise ValueError(
                f"Expected labels 0 and 1, got {int(y.min())} to {int(y.max())}; drop rows with labels that are not "
                "known, or train those labels on their own"
            )
        return y

    def _signed(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Logits of what is the case, tempered."""
        return (2 * y - 1) * outputs / self.temperature

    def _there(self, ensemble: Ensemble) -> Tensor:
        """Whether each label is rather there, as 0 or 1."""
        return self.log_both(ensemble).diff(dim=-1).squeeze(-1).gt(0).long()
