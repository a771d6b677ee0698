"""Hamiltonian Monte Carlo: draws from the exact posterior of a small network, by the no-U-turn sampler."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dapcal.data import Data, gather
from dapcal.likelihoods import Likelihood
from dapcal.networks import (
    any_inputs,
    as_tensor,
    backward_in_evaluation,
    check_outputs,
    frozen_copy,
    layout_of,
    one_column,
    split_state,
)
from dapcal.posteriors._training.checks import check
from dapcal.posteriors.network import NetworkPosterior
from dapcal.prior import Aware, make_prior
from dapcal.progress import Stages
from dapcal.records import DapcalWarning

JITTER = 0.02  # in units of σ0: how far from the model's weights later chains start
FEWEST = 20  # draws of a chain from which its mixing can be judged


class Chain(NamedTuple):
    """What one run of the sampler gives."""

    draws: Tensor  # (S, P) float64
    log_joint: Tensor  # (S,)
    divergences: int


@any_inputs
def fit(
    model: nn.Module,
    likelihood: Likelihood,
    train: Data,
    *,
    prior_scale: float | Mapping[str, float] = 1.0,
    draws: int = 100,
    warm_up: int = 200,
    chains: int = 1,
    max_tree_depth: int = 8,
    target_accept: float = 0.8,
    thin: int = 1,
    seed: int = 0,
    aware: Aware = "*",
    progress: Stages | None = None,
) -> NetworkPosterior:
    """Draw θ with density ∝ exp(−U), U(θ) = −Σ_n log p(y_n | θ, x_n) + ½ Σ θ²/σ0², with NUTS.

    Chains start at the model's weights (all but the first with a little noise), so pass a trained model. The likelihood
    is held as given: fit its noise level first (`dapcal.posteriors.map.fit(...).likelihood`). The network runs in
    evaluation mode: dropout is off, batch-norm statistics, frozen parameters and buffers stay as they are. Each of up
    to 2^max_tree_depth steps an iteration is one pass over all training inputs. `posterior.network` is the draw with
    the highest joint density. Hoffman, Gelman (2014); Neal (1996) for networks. Needs pyro-ppl.

    A `DapcalWarning` comes where transitions diverged, and where the log joint has not mixed: split R̂ over
    1.05 + 10/n for n draws a chain (two in a hundred stationary chains with autocorrelation 0.4 exceed it, at most), or
    fewer effective draws than a tenth. Chains of fewer than 20 draws are not judged.

    Args:
        model: the trained network.
        likelihood: p(y | outputs).
        train: (inputs, targets), a Dataset or a DataLoader, read once; every step looks at all of it.
        prior_scale: σ0, one or by name pattern.
        draws: S, from all chains together.
        warm_up: iterations of each chain before the first draw, which set the step size and (from 20 on; better from
            150 on) the masses.
        chains: run one after the other; several show whether they agree.
        max_tree_depth: of a trajectory, which has at most 2^max_tree_depth steps.
        target_accept: mean acceptance that the step size aims at; higher is slower and more careful.
        thin: iterations per draw kept.
        seed: of everything.
        aware: parameters that a distance may widen, see `dapcal.prior.make_prior`.
        progress: told of every iteration of all chains, as one stage ("sampling").
    """
    check(model, likelihood)
    _check_options(draws, warm_up, chains, max_tree_depth, target_accept, thin)
    nuts, validation = _pyro()
    x, y = gather(train, "train")
    module = frozen_copy(model)
    random, shared = split_state(model)
    layout = layout_of(random)
    start = layout.flatten(random)
    prior = make_prior(layout.sizes, prior_scale, aware, start.device)
    sigma0 = prior.sigma0[prior.group].cpu()
    x = x.to(start.device)

    def forward(vector: Tensor) -> Tensor:
        with backward_in_evaluation(module):
            return one_column(as_tensor(functional_call(module, {**shared, **layout.unflatten(vector)}, (x,))))

    with torch.no_grad():
        targets = likelihood.check(check_outputs(forward(start)[None], len(x))[0], y.to(start.device))

    def potential(sites: Mapping[str, Tensor]) -> Tensor:
        """U; positions are float64 on the CPU, the network keeps its device and dtype."""
        theta = sites["theta"]
        log_likelihood = likelihood.log_likelihood(forward(theta.to(start)), targets)
        return ((theta / sigma0) ** 2).sum() / 2 - log_likelihood.double().sum().cpu()

    with torch.no_grad():
        if not potential({"theta": start.cpu().double()}).isfinite():
            raise ValueError(
                "The log joint at the model's weights is not finite; train the model, and scale inputs and targets"
            )
    each = draws // chains
    done, total = 0, chains * (warm_up + thin * each)

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress("sampling", done, total)

    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**62, (chains,), generator=generator).tolist()
    runs = []
    for chain in range(chains):
        noise = JITTER * sigma0 * torch.randn(len(sigma0), generator=generator, dtype=torch.float64)
        kernel = nuts(potential_fn=potential, max_tree_depth=max_tree_depth, target_accept_prob=target_accept)
        kernel.initial_params = {"theta": start.cpu().double() + (noise if chain else 0)}
        with torch.random.fork_rng(devices=[]), validation(False):
            torch.default_generator.manual_seed(seeds[chain])  # pyro draws from it alone: all positions are on the CPU
            runs.append(_run(kernel, potential, each, warm_up, thin, advance))
    log_joint = torch.stack([run.log_joint for run in runs])  # (chains, S / chains)
    _judge(log_joint, sum(run.divergences for run in runs), chains * each * thin)
    found = torch.cat([run.draws for run in runs])
    return NetworkPosterior(
        model=module,
        likelihood=likelihood,
        layout=layout,
        draws=found.to(start),
        center=found[log_joint.flatten().argmax()].to(start),
        shared=shared,
        prior=prior,
    )


def _run(
    kernel: Any,
    potential: Callable[[Mapping[str, Tensor]], Tensor],
    draws: int,
    warm_up: int,
    thin: int,
    advance: Callable[[], None],
) -> Chain:
    """Warm up, then keep every `thin`-th position."""
    kernel.setup(warm_up)
    position = kernel.initial_params
    kept, log_joint = [], []
    for iteration in range(1, warm_up + thin * draws + 1):
        position = kernel.sample(position)
        if iteration > warm_up and (iteration - warm_up) % thin == 0:
            kept.append(position["theta"].detach().clone())
            with torch.no_grad():
                log_joint.append(-potential(position))
        advance()
    return Chain(torch.stack(kept), torch.stack(log_joint), len(kernel.diagnostics()["divergences"]))


def _judge(log_joint: Tensor, divergences: int, transitions: int) -> None:
    """Warn of divergences, and of a log joint (chains, S / chains) that has not mixed."""
    from pyro.ops.stats import effective_sample_size, split_gelman_rubin

    if divergences:
        warnings.warn(
            f"{divergences} of {transitions} transitions diverged: the draws may miss where the posterior is most "
            "curved; raise `target_accept` (0.95) or `warm_up`, or lower `prior_scale`",
            DapcalWarning,
            stacklevel=3,
        )
    if log_joint.shape[1] < FEWEST:
        return
    r_hat, effective = float(split_gelman_rubin(log_joint)), float(effective_sample_size(log_joint))
    limit = 1.05 + 10 / log_joint.shape[1]
    if not (r_hat <= limit and effective >= log_joint.numel() / 10):  # NaN where a chain never moved
        warnings.warn(
            f"The log joint has not mixed: split R̂ {r_hat:.2f} (at most {limit:.2f}) and {effective:.0f} effective "
            f"draws of {log_joint.numel()} (at least a tenth); raise `warm_up`, `thin` or `max_tree_depth`, and start "
            "from a trained model",
            DapcalWarning,
            stacklevel=3,
        )


def _check_options(draws: int, warm_up: int, chains: int, max_tree_depth: int, target_accept: float, thin: int) -> None:
    counts = {"draws": draws, "warm_up": warm_up, "chains": chains, "max_tree_depth": max_tree_depth, "thin": thin}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"Expected `{name}` >= 1, got {value}")
    if draws % chains:
        raise ValueError(
            f"Expected `draws`, over all chains, as a multiple of `chains`, got {draws} and {chains}; ask for "
            f"{draws + chains - draws % chains}"
        )
    if not 0 < target_accept < 1:
        raise ValueError(f"Expected `target_accept` between 0 and 1, got {target_accept}; 0.8 is usual")


def _pyro() -> tuple[Any, Any]:
    """The NUTS kernel, and the switch for checks that a diverging trajectory would trip."""
    try:
        from pyro import validation_enabled
        from pyro.infer import NUTS
    except ImportError as error:
        raise ImportError(
            "Hamiltonian Monte Carlo needs pyro-ppl; install it with: pip install 'dapcal[mcmc]'"
        ) from error
    return NUTS, validation_enabled
