"""Monte Carlo dropout: a network trained with dropout as a posterior, one fixed set of masks a draw."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dapcal.likelihoods import Likelihood
from dapcal.networks import as_tensor, check_outputs, frozen_copy, leaving, plain, unfused
from dapcal.posteriors._training.checks import check
from dapcal.records import DapcalWarning
from dapcal.storing import Stores

BATCH = 512  # inputs per forward pass
LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
CHANNEL = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)  # drop whole channels
ALPHA = 1.7580993408473766  # a dropped unit before SELU becomes −ALPHA (Klambauer et al. 2017), as torch has it


def wrap(model: nn.Module, likelihood: Likelihood, *, draws: int = 50, seed: int = 0) -> DropoutPosterior:
    """A trained network with dropout as a posterior: draw s is f(x; z_s ∘ θ) with masks z_s ~ Bernoulli(1 − p)/(1 − p).

    Gal, Ghahramani (2016). Only dropout that is a module (`nn.Dropout`, `Dropout1d` to `3d`, `AlphaDropout`,
    `FeatureAlphaDropout`) with p > 0 counts: what a forward method does through `torch.nn.functional`, and the built-in
    rates of attention and recurrent layers, stays off (a `DapcalWarning` names the latter). Batch norm uses its
    statistics. Dropout layers must see the batch as first dimension of their activations, one entry an input.

    Args:
        model: the trained network (`dapcal.posteriors.map.fit(...).network`); it is left as it is.
        likelihood: p(y | outputs).
        draws: S.
        seed: of the masks.
    """
    check(model, likelihood)
    if draws < 1 or seed < 0:
        raise ValueError(f"Expected `draws` >= 1 and `seed` >= 0, got {draws} and {seed}")
    model = plain(model)
    rates = {n: float(m.p) for n, m in model.named_modules() if isinstance(m, LAYERS) and m.p > 0}
    built_in = [n or type(m).__name__ for n, m in model.named_modules() if _built_in_rate(m) > 0]
    if not rates:
        raise ValueError(
            "Expected a model with dropout modules of p > 0, got none"
            + (f" (dropout inside {built_in} cannot be drawn)" if built_in else "")
            + "; train it with nn.Dropout modules, in place of torch.nn.functional.dropout, or fit another posterior"
        )
    if built_in:
        warnings.warn(
            f"Dropout inside attention or recurrent layers stays off: {built_in}. Only dropout modules are drawn; to "
            "have all of it, train with those rates at 0 and nn.Dropout modules around the layers",
            DapcalWarning,
            stacklevel=2,
        )
    state = {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    return DropoutPosterior(frozen_copy(model), likelihood, state, rates, draws, seed)


@dataclass(frozen=True, eq=False)
class DropoutPosterior:
    """Draws of a network's dropout masks: what Inflate needs. Weights have no moments here, and no prior scale.

    A draw is a function: its masks are the same for every input, so that batches and their order do not matter and
    predictions of several inputs belong together.

    Attributes:
        model: a frozen copy of the network; its own weights are never used.
        likelihood: p(y | outputs).
        state: all parameters and buffers, by name.
        rates: p of the dropout layers, by name, in the order that numbers them.
        draws: S.
        seed: of the masks.
        share: of a mask's deviation from 1 that is applied; 0 would be the network without dropout.
    """

    stores = Stores(given={"model": "model", "likelihood": "likelihood"})

    model: nn.Module
    likelihood: Likelihood
    state: dict[str, Tensor]
    rates: dict[str, float]
    draws: int
    seed: int
    share: float = 1.0

    gaussian: None = None
    prior: None = None
    squared_norms: None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"Expected `model` as an nn.Module, got {type(self.model).__name__}")
        modules = dict(self.model.named_modules())
        absent = [name for name in self.rates if not isinstance(modules.get(name), LAYERS)]
        if absent:
            raise ValueError(f"Expected a model with the dropout layers {list(self.rates)}, got one without {absent}")

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs of all draws, (S, N, C)."""
        device = next((tensor.device for tensor in self.state.values()), x.device)
        layers = {name: self.model.get_submodule(name) for name in self.rates}
        drawn = []
        with torch.no_grad(), unfused():
            for draw in range(self.draws):
                masks, pieces = Masks((self.seed, draw), self.rates, self.share), []
                for batch in x.split(BATCH):
                    with masks.on(layers, len(batch)):
                        piece = as_tensor(functional_call(self.model, self.state, (batch.to(device),)))
                    pieces.append(check_outputs(piece[None], len(batch)))
                drawn.append(torch.cat(pieces, 1))
        return torch.cat(drawn)

    def moments(self, x: Tensor, moving: bool = False) -> None:  # noqa: ARG002
        """None: draws are all there is."""
        return

    @property
    def alone(self) -> nn.Module:
        """The network without dropout."""
        return self.network

    def narrowed(self, share: float) -> DropoutPosterior:
        """Masks nearer to 1: their deviations from it times `share`."""
        return replace(self, share=share * self.share)

    @cached_property
    def network(self) -> nn.Module:
        """The network without dropout."""
        module = copy.deepcopy(self.model)
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                tensor.copy_(self.state[name])
        return module


class Masks:
    """The masks of one draw, each made from (seed, draw, layer, call) when it is first needed, then kept."""

    def __init__(self, seed: tuple[int, int], rates: Mapping[str, float], share: float = 1.0) -> None:
        self.seed, self.rates, self.share = seed, rates, share
        self.made: dict[tuple[int, int, torch.Size], tuple[Tensor, Tensor | None]] = {}

    @contextmanager
    def on(self, layers: Mapping[str, nn.Module], n: int) -> Iterator[None]:
        """Layers in evaluation mode drop by these masks while n inputs pass through them."""
        calls: Counter[int] = Counter()  # a layer that runs twice in a forward pass has two masks
        numbers = {name: number for number, name in enumerate(layers)}
        with leaving(layers, lambda name, output: self._drop(calls, n, numbers[name], name, layers[name], output)):
            yield

    def _drop(
        self, calls: Counter[int], n: int, number: int, name: str, layer: nn.Module, activation: Tensor
    ) -> Tensor:
        fewest = 3 if isinstance(layer, nn.Dropout1d) else 5 if isinstance(layer, nn.Dropout3d) else 1
        if activation.ndim < fewest or len(activation) != n:
            raise ValueError(
                f"Expected activations of {n} inputs, batch first, at dropout layer `{name}` ({layer}), got shape "
                f"{tuple(activation.shape)}; use batch_first=True, or dropout where the first dimension is the batch"
            )
        key = number, calls[number], activation.shape[1:]
        calls[number] += 1
        if key not in self.made:
            seed = int(np.random.SeedSequence([*self.seed, *key[:2]]).generate_state(1)[0])
            mask = draw_mask(layer, self.rates[name], activation, torch.Generator().manual_seed(seed))
            self.made[key] = mask if self.share == 1 else _nearer_to_one(*mask, self.share)
        factor, shift = self.made[key]
        return activation * factor if shift is None else activation * factor + shift


def draw_mask(
    layer: nn.Module, rate: float, activation: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """One mask for all inputs, as a factor and a shift of activations (N, ...), with torch's scaling.

    Dropout: z/(1 − p). Alpha dropout: a (x z − α (1 − z)) + b with a = ((1 + p α²)(1 − p))^(−½), b = a α p, which
    keeps mean 0 and variance 1.
    """
    shape = activation.shape[1:]
    if isinstance(layer, CHANNEL):
        shape = torch.Size([*shape[:1], *[1] * (len(shape) - 1)])
    kept = (torch.rand(shape, generator=generator) >= rate).to(activation)
    if rate == 1:
        return torch.zeros_like(kept), None
    if not isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout):
        return kept / (1 - rate), None
    scale = ((1 + rate * ALPHA**2) * (1 - rate)) ** -0.5
    return scale * kept, scale * ALPHA * (kept - 1 + rate)


def _nearer_to_one(factor: Tensor, shift: Tensor | None, share: float) -> tuple[Tensor, Tensor | None]:
    return 1 + share * (factor - 1), None if shift is None else share * shift


def _built_in_rate(module: nn.Module) -> float:
    """The rate of dropout that is not a module."""
    if isinstance(module, nn.RNNBase):
        return module.dropout if module.num_layers > 1 else 0.0  # torch drops between layers
    return module.dropout if isinstance(module, nn.MultiheadAttention) else 0.0
