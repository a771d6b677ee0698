"""bayesian-torch: a mean-field network of its layers as plain layers at the means, and a diagonal Gaussian.

In use:

    dnn_to_bnn(model, bnn_prior_parameters)  # or layers such as LinearReparameterization, then training
    posterior = dapcal.adapters.bayesian_torch.from_mean_field(model, Categorical())
    calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out)

Read an artefact back with `dapcal.load(path, plain_network(model))`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dapcal.likelihoods import Likelihood
from dapcal.posteriors import gaussian
from dapcal.posteriors.network import NetworkPosterior
from dapcal.prior import Aware


def from_mean_field(
    module: nn.Module,
    likelihood: Likelihood,
    *,
    draws: int = 50,
    seed: int = 0,
    aware: Aware = "*",
) -> NetworkPosterior:
    """N(μ, diag σ²) with σ = log(1 + exp ρ), over the weights of all reparameterisation and flipout layers.

    Parameters are named as in plain layers: `weight` for `mu_weight` or `mu_kernel`, `bias` for `mu_bias`. All others
    (batch norm, ordinary layers) stay fixed. σ0 is what the layers' KL term has as the prior's standard deviation:
    bayesian-torch fills it with the argument named `prior_variance`. That KL term is a mean over a layer's weights,
    not a sum, so a network trained with it as it stands is closer to its data than a posterior under σ0 would be.

    Args:
        module: the trained network; its forward may return outputs, or outputs and a KL term.
        likelihood: p(y | outputs).
        draws: S.
        seed: of the draws.
        aware: parameters that a distance may widen, see `dapcal.prior.make_prior`.
    """
    if draws < 1:
        raise ValueError(f"Expected `draws` >= 1, got {draws}")
    scale: dict[str, Tensor] = {}
    sigma0: dict[str, float] = {}
    for path, layer in module.named_modules():
        for mu, rho, own, prior in _parts(layer):
            name = f"{path}.{own}" if path else own
            scale[name] = nn.functional.softplus(getattr(layer, rho).detach())
            sigma0[name] = _prior_scale(layer, prior, f"{path}.{mu}" if path else mu)
    if not scale:
        raise ValueError(
            "Expected a network with bayesian-torch layers (parameters mu_weight and rho_weight, or mu_kernel and "
            f"rho_kernel), got {type(module).__name__} without any; convert it with dnn_to_bnn and train it"
        )
    network = plain_network(module)
    return gaussian.diagonal(network, likelihood, scale, prior_scale=sigma0, draws=draws, seed=seed, aware=aware)


def plain_network(module: nn.Module) -> nn.Module:
    """A copy with `nn.Linear` and convolutions, holding the means, in place of the variational layers.

    A layer that returned its output and a KL term now returns its output and zero, so a forward that unpacks them runs
    as before; the network as a whole returns its outputs alone.
    """
    network = copy.deepcopy(module)
    modules = list(network.modules())
    plain = {id(layer): _plain(layer) for layer in modules if _parts(layer)}
    for parent in modules:
        for name, child in parent._modules.items():  # a shared layer appears under each of its names
            if id(child) in plain:
                setattr(parent, name, plain[id(child)])
    network = plain.get(id(network), network)
    network.register_forward_hook(_outputs_alone)
    return network


def _outputs_alone(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _parts(layer: nn.Module) -> list[tuple[str, str, str, str]]:
    """(mean, rho, plain name, prior) of a variational layer's own parameters; none for other modules."""
    known = (("weight", "weight", "weight"), ("kernel", "weight", "weight"), ("bias", "bias", "bias"))
    own = layer._parameters
    return [
        (f"mu_{theirs}", f"rho_{theirs}", plain, f"prior_{prior}")
        for theirs, plain, prior in known
        if own.get(f"mu_{theirs}") is not None and own.get(f"rho_{theirs}") is not None
    ]


def _prior_scale(layer: nn.Module, prior: str, name: str) -> float:
    mean, sigma = getattr(layer, f"{prior}_mu"), getattr(layer, f"{prior}_sigma")
    if torch.as_tensor(mean).count_nonzero():
        raise ValueError(
            f"Expected a prior with mean 0, got another for `{name}`: the distance-aware prior widens N(0, σ0²); train "
            "with prior_mean=0 (prior_mu=0 in dnn_to_bnn)"
        )
    sigma = torch.as_tensor(sigma).flatten()
    if (sigma != sigma[0]).any():
        raise ValueError(
            f"Expected one prior scale for `{name}`, got {float(sigma.min()):.3g} to {float(sigma.max()):.3g}; train "
            "with one prior_variance a layer"
        )
    return float(sigma[0])


def _plain(layer: nn.Module) -> nn.Module:
    """The layer at its means."""
    if getattr(layer, "quant_prepare", False):
        raise ValueError(
            f"Expected layers that are not prepared for quantisation, got a prepared {type(layer).__name__}; convert "
            "the network before quantising it"
        )
    means = {plain: getattr(layer, mu).detach().clone() for mu, _, plain, _ in _parts(layer)}
    weight, bias = means["weight"], means.get("bias")
    options: dict[str, Any] = {"bias": bias is not None, "device": weight.device, "dtype": weight.dtype}
    plain: _WithKL
    if hasattr(layer, "mu_weight"):
        plain = _Linear(weight.shape[1], weight.shape[0], **options)
    else:
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
        transposed = hasattr(layer, "output_padding")
        options |= {name: getattr(layer, name) for name in (*names, *(("output_padding",) if transposed else ()))}
        plain = _CONVOLUTIONS[transposed, weight.ndim - 2](**options)
    plain.load_state_dict(means)
    plain.returns_kl = not getattr(layer, "dnn_to_bnn_flag", False)
    return plain.train(layer.training)


class _WithKL(nn.Module):
    """A plain layer that is called as its variational one: outputs, and a KL term where one is expected."""

    returns_kl: bool

    def forward(self, *inputs: Any, return_kl: bool = True, **named: Any) -> Any:
        outputs = super().forward(*inputs, **named)
        return (outputs, outputs.new_zeros(())) if return_kl and self.returns_kl else outputs


class _Linear(_WithKL, nn.Linear):
    pass


class _Conv1d(_WithKL, nn.Conv1d):
    pass


class _Conv2d(_WithKL, nn.Conv2d):
    pass


class _Conv3d(_WithKL, nn.Conv3d):
    pass


class _ConvTranspose1d(_WithKL, nn.ConvTranspose1d):
    pass


class _ConvTranspose2d(_WithKL, nn.ConvTranspose2d):
    pass


class _ConvTranspose3d(_WithKL, nn.ConvTranspose3d):
    pass


_CONVOLUTIONS: dict[tuple[bool, int], Any] = {
    (False, 1): _Conv1d,
    (False, 2): _Conv2d,
    (False, 3): _Conv3d,
    (True, 1): _ConvTranspose1d,
    (True, 2): _ConvTranspose2d,
    (True, 3): _ConvTranspose3d,
}
