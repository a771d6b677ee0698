"""Pyro, NumPyro, NumPy: draws as a dict of arrays, matched to a model's parameters by name.

In use:

    mcmc.run(x, y)  # of pyro or numpyro
    draws = mcmc.get_samples()
    posterior = dapcal.adapters.sample_dicts.from_samples(draws, model, Gaussian(0.3), prior_scale=1.0)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dapcal.likelihoods import Likelihood
from dapcal.posteriors import samples as brought
from dapcal.posteriors.network import NetworkPosterior
from dapcal.prior import Aware


def from_samples(
    samples: Mapping[str, Any],
    model: nn.Module,
    likelihood: Likelihood,
    *,
    rename: Mapping[str, str] | None = None,
    prior_scale: float | Mapping[str, float] | None = None,
    grouped_by_chain: bool = False,
    aware: Aware = "*",
) -> NetworkPosterior:
    """Draws of a torch model's parameters, from sites that other libraries named.

    A site belongs to a parameter if the names agree exactly, or for all parameters alike after one common prefix is
    dropped, with any of `.`, `/`, `_` and `$$$` between their parts: `0.weight` is found as `net.0.weight` (Pyro),
    `module$$$0.weight` (Pyro's random_module) or `net/0/weight`. Every parameter that requires a gradient must be
    found; frozen ones may be missing and stay at the model's values. Other sites (a noise level, observations,
    unconstrained copies) are not weights of the model and are not used: a noise level goes into `likelihood`.

    Args:
        samples: arrays (S, ...) by site, of torch, NumPy or JAX. Dimensions of size 1 that Pyro's `Predictive` puts
            behind the draws are dropped. Weights are (outputs, inputs) as in torch: transpose the kernels of JAX.
        model: the network whose parameters the sites are.
        likelihood: p(y | outputs), e.g. `Gaussian(float(draws["sigma"].mean()))`.
        rename: site -> parameter, for sites whose names follow no rule; where given, it comes before all rules.
        prior_scale: σ0 of the weights' prior, which Reweight needs.
        grouped_by_chain: arrays are (chains, S, ...), as `get_samples(group_by_chain=True)` gives them.
        aware: parameters that a distance may widen; only with `prior_scale`.
    """
    parameters = dict(model.named_parameters())
    sites = _match(list(samples), parameters, dict(rename or {}))
    stacked = {name: _draws(samples[site], site, parameters[name], grouped_by_chain) for name, site in sites.items()}
    return brought.from_stacked(model, likelihood, stacked, prior_scale=prior_scale, aware=aware)


def _match(sites: list[str], parameters: Mapping[str, Tensor], rename: dict[str, str]) -> dict[str, str]:
    """Parameter -> site."""
    unknown = [s for s in rename if s not in sites] + [n for n in rename.values() if n not in parameters]
    if unknown:
        raise ValueError(
            f"Expected `rename` from sites to parameters, got unknown {unknown}; {_both(sites, parameters)}"
        )
    found = {name: site for site, name in rename.items()}
    if len(found) != len(rename):
        raise ValueError(f"Expected `rename` to name each parameter once, got {rename}")
    left = [site for site in sites if site not in rename]
    found |= {name: name for name in parameters if name in left and name not in found}
    wanted = [name for name in parameters if name not in found]
    needed = [name for name in wanted if parameters[name].requires_grad]
    if needed:
        found |= _by_rule([site for site in left if site not in found], wanted, needed, _both(sites, parameters))
    return {name: found[name] for name in parameters if name in found}


def _by_rule(sites: list[str], wanted: list[str], needed: list[str], both: str) -> dict[str, str]:
    """Parameter -> site, where dropping one prefix from sites or from parameters finds all that are needed."""
    by_parts: dict[tuple[str, ...], list[str]] = {}
    for site in sites:
        by_parts.setdefault(_parts(site), []).append(site)
    first = _parts(needed[0])
    drops = [(parts[: len(parts) - len(first)], 0) for parts in by_parts if parts[-len(first) :] == first]
    drops += [((), count) for count in range(1, len(first)) if first[count:] in by_parts]
    rules = []
    for prefix, count in drops:
        places = {n: (*prefix, *_parts(n)[count:]) for n in wanted if _parts(n)[:count] == first[:count]}
        if all(n in places and places[n] in by_parts for n in needed) and len(set(places.values())) == len(places):
            rules.append({name: by_parts[place] for name, place in places.items() if place in by_parts})
    if not rules:
        raise ValueError(
            f"Found no draws of {needed[:4]}: no common prefix leads from all parameters to sites; give `rename`, or "
            f"freeze parameters that have no draws. {both}"
        )
    candidates = {name: sorted({site for rule in rules for site in rule.get(name, [])}) for name in wanted}
    for name, options in candidates.items():
        if len(options) > 1:
            raise ValueError(
                f"Expected one site a parameter, but `{name}` may be any of {options}; give `rename`, or the sites of "
                f"this network alone. {both}"
            )
    return {name: options[0] for name, options in candidates.items() if options}


def _parts(name: str) -> tuple[str, ...]:
    return tuple(part for part in re.split(r"\$\$\$|[./_]", name) if part)


def _both(sites: list[str], parameters: Mapping[str, Tensor]) -> str:
    return f"Sites: {sites}. Parameters: {list(parameters)}"


def _draws(value: Any, site: str, parameter: Tensor, grouped_by_chain: bool) -> Tensor:
    """(S, *shape) in the parameter's dtype and device."""
    if isinstance(value, Tensor):
        draws = value.detach().to(parameter)
    else:  # a copy: JAX arrays are read-only
        wide = np.float64 if parameter.dtype == torch.float64 else np.float32
        draws = torch.from_numpy(np.array(value, dtype=wide)).to(parameter)
    lead = 2 if grouped_by_chain else 1
    got, shape = tuple(draws.shape), tuple(parameter.shape)
    if len(got) < lead:
        raise ValueError(f"Expected draws of site `{site}` with {lead} leading dimension(s), got shape {got}")
    while len(got) > lead + len(shape) and got[lead] == 1:
        got = (*got[:lead], *got[lead + 1 :])
    if got[lead:] != shape:
        raise ValueError(
            f"Expected draws of site `{site}` of shape {('chains, S' if grouped_by_chain else 'S')}, *{shape}, got "
            f"{tuple(draws.shape)}; {_remedy(got, shape, lead)}"
        )
    return draws.reshape(-1, *shape)


def _remedy(got: tuple[int, ...], shape: tuple[int, ...], lead: int) -> str:
    if got[lead:] == shape[::-1]:
        return "a kernel (inputs, outputs) of JAX is the transpose of a torch weight: swap its last two axes"
    if lead == 1 and got[2:] == shape:
        return "draws by chain need grouped_by_chain=True"
    if lead == 2 and got[1:] == shape:
        return "draws that are not grouped by chain need grouped_by_chain=False"
    return "check that the model is the one that was sampled"
