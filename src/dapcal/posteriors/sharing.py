"""Members that share most of their weights, trained side by side on the same batches: an ensemble at the price of few.

rows ──► shared layers with each member's own scales ──► k outputs, each with a loss of its own

Gorishniy, Kotelnikov, Babenko (2025), arXiv:2410.24210 (TabM); Wen, Tran, Ba (2020), arXiv:2002.06715 (BatchEnsemble).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from dapcal.data import Labelled, batch_sizes, order_of
from dapcal.likelihoods import Likelihood
from dapcal.networks import vectorising
from dapcal.posteriors import samples
from dapcal.posteriors._training.batched import Best
from dapcal.posteriors.network import NetworkPosterior
from dapcal.progress import Epoch

State = dict[str, Tensor]


def fit_each(
    makes: Sequence[Callable[[], nn.Module]],
    likelihood: Likelihood,
    train: Sequence[Labelled],
    held_out: Sequence[Labelled] | None,
    *,
    own: Callable[[str], bool],
    members: int = 16,
    epochs: int = 100,
    batch_size: int = 256,
    learning_rate: float = 2e-3,
    weight_decay: float = 3e-4,
    patience: int | None = None,
    last: int | None = None,
    row_weights: Sequence[Tensor] | None = None,
    seed: int = 0,
    progress: Callable[[Epoch], None] = lambda epoch: None,  # noqa: ARG005
) -> list[NetworkPosterior]:
    """An ensemble for each of several training sets, all of them side by side.

    A draw of the posterior is a member: its own parameters, beside `shared` ones. Every set stays at the epoch at which
    its members together say the most of its held-out rows.

    Args:
        makes: for every training set a function that returns a new network (of one architecture); called under the
            seed of a member, and the first gives the shared weights.
        likelihood: p(y | outputs); its free values are learnt too, one for all members.
        train: training sets of one size, targets as the likelihood wants them.
        held_out: for each of them rows, of one number too; None: training ends with the last epoch.
        own: whether a parameter of that name belongs to a member.
        members: k.
        epochs: passes over the data, at most.
        batch_size: rows in a step; all members see the same.
        learning_rate: of AdamW at the start; it falls to zero along a cosine.
        weight_decay: of AdamW.
        patience: epochs without a better held-out likelihood after which a set stops.
        last: epoch with which training ends, before the learning rate is zero.
        row_weights: of the rows of every training set.
        seed: of initial weights, batches and dropout.
        progress: told of every epoch, with the held-out NLL of the first set.
    """
    if members < 2:
        raise ValueError(f"Expected `members` >= 2, got {members}; one network has no spread")
    rows, watched = _stacked(train), None if held_out is None else _stacked(held_out)
    started = [_started(make, own, members, seed * members) for make in makes]
    network = started[0].network
    state = {
        "own": _side_by_side([one.own for one in started]),  # (J, k, ...)
        "shared": _side_by_side([one.shared for one in started]),  # (J, ...)
        "free": {n: v.to(rows.x).expand(len(makes)).clone() for n, v in likelihood.free().items()},  # (J,)
    }
    fixed = _side_by_side([one.fixed for one in started])
    parameters = [tensor.requires_grad_() for part in state.values() for tensor in part.values()]
    optimizer = torch.optim.AdamW(parameters, learning_rate, weight_decay=weight_decay, fused=True)
    count, best = rows.x.shape[1], Best(parameters)
    sizes = batch_sizes(count, batch_size)
    generators = [torch.Generator().manual_seed(seed + place) for place in range(len(makes))]
    each: Sequence[Tensor | None] = row_weights or [None] * len(makes)
    weighed = list(zip(generators, each, strict=True))
    step = 0
    device = rows.x.device
    with torch.random.fork_rng(devices=[]), vectorising():
        torch.random.default_generator.manual_seed(seed)  # of dropout
        for epoch in range(epochs if last is None else last):
            network.train()
            order = torch.stack([order_of(count, *own) for own in weighed]).to(device)
            total = 0.0
            for index in order.split(sizes, 1):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * step / (epochs * len(sizes))))
                at, outputs, y = _seen(network, likelihood, state, fixed, rows.at(index))
                loss = -at.log_likelihood(outputs, y).mean((1, 2)).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total, step = total + float(loss.detach()) * index.shape[1], step + 1
            if watched is None:
                progress(Epoch(epoch + 1, epochs, total / count / len(makes), None))
                continue
            network.eval()
            nll = _together(network, likelihood, state, fixed, watched)
            if not nll.isfinite().all():
                raise ValueError(
                    f"The held-out NLL became {float(nll[~nll.isfinite()][0])} in epoch {epoch + 1}; lower "
                    "`learning_rate` or scale the inputs and targets"
                )
            best.compare(nll, epoch, patience)
            progress(Epoch(epoch + 1, epochs, total / count / len(makes), float(nll[0])))
            if best.ended:
                break
    found = iter(best.values if watched is not None else [parameter.detach() for parameter in parameters])
    learnt = {part: {name: next(found) for name in tensors} for part, tensors in state.items()}
    return [_posterior(started[place], likelihood, learnt, place) for place in range(len(makes))]


class _Rows(NamedTuple):
    """Of J sets."""

    x: Tensor  # (J, N, P)
    y: Tensor  # (J, N, ...)

    def at(self, index: Tensor) -> _Rows:
        """Those at places (J, B), of each set its own."""
        return _Rows(*(torch.stack([own[i] for own, i in zip(part, index, strict=True)]) for part in self))


class _Started(NamedTuple):
    """An ensemble before training: one network, and what its members have in place of its parameters."""

    network: nn.Module
    own: State  # (k, ...)
    shared: State
    fixed: State  # buffers of fractions, which may differ between sets


def _started(make: Callable[[], nn.Module], own: Callable[[str], bool], members: int, seed: int) -> _Started:
    networks = [_made(make, seed + member) for member in range(members)]
    parameters = [dict(network.named_parameters()) for network in networks]
    first = networks[0]
    return _Started(
        network=copy.deepcopy(first),
        own={n: torch.stack([p[n].detach() for p in parameters]) for n in parameters[0] if own(n)},
        shared={n: p.detach().clone() for n, p in parameters[0].items() if not own(n)},
        fixed={n: b.clone() for n, b in first.named_buffers() if b.is_floating_point()},
    )


def _made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        return make()


def _seen(
    network: nn.Module, likelihood: Likelihood, state: Mapping[str, State], fixed: State, rows: _Rows
) -> tuple[Likelihood, Tensor, Tensor]:
    """The likelihood as it is now, outputs of every member (J, k, B, C), and targets (J, k, B, ...)."""

    def one(own: State, shared: State, x: Tensor) -> Tensor:
        return functional_call(network, {**shared, **own}, (x,))

    each = vmap(one, in_dims=(0, None, None), randomness="different")
    whole = {**state["shared"], **fixed}
    if len(rows.x) == 1:  # one map less to go through
        outputs = each({n: t[0] for n, t in state["own"].items()}, {n: t[0] for n, t in whole.items()}, rows.x[0])[None]
    else:
        outputs = vmap(each, in_dims=(0, 0, 0), randomness="different")(state["own"], whole, rows.x)  # (J, k, B, C)
    with torch.enable_grad():  # a likelihood takes several values of what is being learnt, but one of what is known
        at = likelihood.at({n: v[:, None, None, None] for n, v in state["free"].items()})
    return at, outputs, rows.y[:, None].expand(-1, outputs.shape[1], *rows.y.shape[1:])


def _together(
    network: nn.Module, likelihood: Likelihood, state: Mapping[str, State], fixed: State, rows: _Rows
) -> Tensor:
    """Mean negative log of the members' mean density, (J,)."""
    with torch.no_grad():
        at, outputs, y = _seen(network, likelihood, state, fixed, rows)
        each = at.log_likelihood(outputs, y)
        return math.log(each.shape[1]) - each.logsumexp(1).mean(1)


def _posterior(started: _Started, likelihood: Likelihood, learnt: Mapping[str, State], place: int) -> NetworkPosterior:
    own, shared, free = ({n: t[place] for n, t in learnt[part].items()} for part in ("own", "shared", "free"))
    network = started.network
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name in shared:
                parameter.copy_(shared[name])
    return samples.from_stacked(network.eval(), likelihood.at(free), own)


def _side_by_side(states: Sequence[State]) -> State:
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def _stacked(parts: Sequence[Labelled]) -> _Rows:
    sizes = {len(part.x) for part in parts}
    if len(sizes) != 1:
        raise ValueError(f"Expected sets of one size, got {sorted(sizes)} rows; leave out surplus rows")
    return _Rows(torch.stack([part.x for part in parts]), torch.stack([part.y for part in parts]))
