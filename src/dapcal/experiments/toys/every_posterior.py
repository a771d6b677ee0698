"""Every posterior on both toy problems, before and after it is adjusted to distance."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dapcal.calibrate import Calibrated, calibrate
from dapcal.calibration import inputs as ood_inputs
from dapcal.calibration.inputs import OODInputs
from dapcal.experiments.records import Experiment, Outcome, Picture, Run, environment, one_thread
from dapcal.experiments.toys import sinusoid, two_moons
from dapcal.experiments.toys.posterior_plots import MOONS, WAVES, draw_moons, draw_waves, figure, grid
from dapcal.likelihoods import Bernoulli, Gaussian, Likelihood
from dapcal.posteriors import dropout, ensemble, hmc, laplace, sgmcmc, swag, variational, vogn
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors.network import NetworkPosterior
from dapcal.types import DapcalWarning, Posterior

DRAWS, MEMBERS, NUTS_DRAWS, NUTS_WARM_UP, NUTS_DEPTH = 100, 5, 60, 150, 7
EPOCHS, RATE = 300, 1e-2
BATCH = 250


class Problem(NamedTuple):
    """A toy problem with its trained network."""

    network: Callable[[int, float], nn.Module]  # from a seed and a dropout rate
    likelihood: Likelihood
    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    outside: OODInputs
    point: NetworkPosterior  # MAP
    seed: int
    step: float  # factor on the rates of methods that take plain gradient steps: the loss is as steep as its inverse


def _variational(p: Problem) -> Posterior:
    return variational.fit(
        p.point.network, p.point.likelihood, p.train, draws=DRAWS, epochs=4 * EPOCHS, learning_rate=RATE,
        batch_size=BATCH, seed=p.seed,
    )  # fmt: skip


def _vogn(p: Problem) -> Posterior:
    return vogn.fit(
        p.point.network, p.point.likelihood, p.train, draws=DRAWS, epochs=EPOCHS, learning_rate=RATE,
        batch_size=BATCH, seed=p.seed,
    )  # fmt: skip


def _laplace(structure: laplace.Structure) -> Callable[[Problem], Posterior]:
    return lambda p: laplace.fit(
        p.point.network, p.point.likelihood, p.train, structure=structure, draws=DRAWS, seed=p.seed
    )


def _last_layer(p: Problem) -> Posterior:
    return laplace.last_layer(p.point.network, p.point.likelihood, p.train, draws=DRAWS, seed=p.seed)


def _swag(p: Problem) -> Posterior:
    return swag.fit(
        p.point.network, p.point.likelihood, p.train, draws=DRAWS, epochs=EPOCHS, learning_rate=RATE * p.step,
        batch_size=32, seed=p.seed,
    )  # fmt: skip


def _dropout(p: Problem) -> Posterior:
    trained = _map(p.network(p.seed, 0.1), p.likelihood, p.train, p.seed)
    return dropout.wrap(trained.network, trained.likelihood, draws=DRAWS, seed=p.seed)


def _ensemble(p: Problem) -> Posterior:
    return ensemble.fit(
        lambda: p.network(int(torch.randint(2**31, (1,))), 0.0), p.likelihood, p.train, members=MEMBERS, seed=p.seed,
        epochs=EPOCHS, learning_rate=RATE, batch_size=BATCH,
    )  # fmt: skip


def _sgmcmc(method: Callable[..., Posterior], rate: float) -> Callable[[Problem], Posterior]:
    return lambda p: method(
        p.point.network, p.point.likelihood, p.train, draws=DRAWS, epochs=3 * EPOCHS, learning_rate=rate * p.step,
        batch_size=BATCH, seed=p.seed,
    )  # fmt: skip


def _nuts(p: Problem) -> Posterior:
    return hmc.fit(
        p.point.network, p.point.likelihood, p.train, draws=NUTS_DRAWS, warm_up=NUTS_WARM_UP,
        max_tree_depth=NUTS_DEPTH, seed=p.seed,
    )  # fmt: skip


METHODS: dict[str, Callable[[Problem], Posterior]] = {
    "mean-field variational": _variational,
    "VOGN": _vogn,
    "Laplace, diagonal": _laplace(laplace.Diagonal),
    "Laplace, Kronecker": _laplace(laplace.Kronecker),
    "Laplace, full": _laplace(laplace.Full),
    "Laplace, last layer": _last_layer,
    "SWAG": _swag,
    "MC dropout": _dropout,
    "ensemble": _ensemble,
    "SGLD": _sgmcmc(sgmcmc.sgld, 5e-2),
    "SGHMC": _sgmcmc(sgmcmc.sghmc, 1e-2),
    "NUTS": _nuts,
}


@one_thread()
def run(this: Run) -> Outcome:
    """Fit every posterior to both problems and calibrate it with all defaults."""
    seed, progress, started = this.seed, this.progress, time.perf_counter()
    numbers: dict[str, Any] = {
        "experiment": "posteriors",
        "seed": seed,
        "environment": environment(),
        "settings": {
            "draws": DRAWS, "members": MEMBERS, "nuts_draws": NUTS_DRAWS, "map_epochs": EPOCHS, "sigma0": 1.0,
            "two_moons": "2-20-20-1 tanh", "sinusoid": f"1-{sinusoid.WIDTH}-{sinusoid.WIDTH}-1 SiLU, one noise level",
        },
    }  # fmt: skip
    pictures = []
    for name, problem, measure, draw, caption in (
        ("two moons", _moons(seed), _measure_moons, draw_moons, MOONS),
        ("sinusoid", _waves(seed), _measure_waves, draw_waves, WAVES),
    ):
        found, panels = {}, []
        for step, (method, fit) in enumerate(METHODS.items()):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", DapcalWarning)
                begun = time.perf_counter()
                posterior = fit(problem)
                seconds = time.perf_counter() - begun
                calibrated = calibrate(posterior, train=problem.train, held_out=problem.held_out, ood=problem.outside)
                found[method] = {
                    "phi": calibrated.phi,
                    "fit_seconds": round(seconds, 1),
                    **measure(calibrated, problem),
                }
                panels.append((method, calibrated(grid(name))))
            found[method]["warnings"] = sorted({str(w.message) for w in caught})
            progress(name, step + 1, len(METHODS))
        numbers[name] = found
        pictures.append(Picture(name.replace(" ", "-"), figure(panels, problem.train, draw), caption))
    numbers["seconds"] = round(time.perf_counter() - started, 1)
    return Outcome(numbers, pictures)


def _map(model: nn.Module, likelihood: Likelihood, train: tuple[Tensor, Tensor], seed: int) -> NetworkPosterior:
    return map_posterior.fit(model, likelihood, train, epochs=EPOCHS, learning_rate=RATE, batch_size=BATCH, seed=seed)


def _network(inputs: int, width: int, activation: type[nn.Module]) -> Callable[[int, float], nn.Module]:
    def make(seed: int, rate: float) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers: list[nn.Module] = [nn.Linear(inputs, width), activation()]
            layers += [nn.Dropout(rate)] * (rate > 0)
            layers += [nn.Linear(width, width), activation()]
            layers += [nn.Dropout(rate)] * (rate > 0)
            return nn.Sequential(*layers, nn.Linear(width, 1))

    return make


def _moons(seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    train, held_out = (two_moons.moons(two_moons.POINTS, two_moons.NOISE, generator) for _ in range(2))
    network = _network(2, two_moons.WIDTH, nn.Tanh)
    point = _map(network(seed, 0.0), Bernoulli(), train, seed)
    return Problem(network, Bernoulli(), train, held_out, ood_inputs.Around(deviation=0.1, seed=seed), point, seed, 1.0)


def _waves(seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    train, held_out = (sinusoid.waves(sinusoid.POINTS, generator) for _ in range(2))
    network = _network(1, sinusoid.WIDTH, nn.SiLU)
    point = _map(network(seed, 0.0), Gaussian(), train, seed)
    return Problem(network, Gaussian(), train, held_out, sinusoid.just_outside(train[0], seed), point, seed, 0.02)


def _measure_moons(calibrated: Calibrated, problem: Problem) -> dict[str, Any]:
    (x, y), places = problem.held_out, grid("two moons")
    far = torch.cdist(places, problem.train[0]).min(1).values > two_moons.FAR
    inside, outside = calibrated(x), calibrated(places[far])
    return {
        "held_out_accuracy": [float((p.probs.argmax(-1) == y).double().mean()) for p in (inside.base, inside)],
        "held_out_nll": [float(-p.log_prob(y).mean()) for p in (inside.base, inside)],
        "confidence_far_away": [float(p.probs.max(-1).values.mean()) for p in (outside.base, outside)],
    }


def _measure_waves(calibrated: Calibrated, problem: Problem) -> dict[str, Any]:
    (x, y), probes = problem.held_out, calibrated(torch.tensor(sinusoid.PROBES)[:, None])
    held, typical = calibrated(x), sinusoid.band(calibrated(problem.train[0])).quantile(0.95)
    return {
        "held_out_rmse": [float(((p.mean - y) ** 2).mean().sqrt()) for p in (held.base, held)],
        "held_out_nll": [float(-p.log_prob(y).mean()) for p in (held.base, held)],
        "band_over_training_q95": [(sinusoid.band(p) / typical).tolist() for p in (probes.base, probes)],
    }


EXPERIMENT = Experiment(
    title="Every posterior",
    text="Both toy problems with every way of getting a posterior, one seed and no tuning per method; calibrated with "
    "all defaults on draws from Gaussians just outside the data.",
    run=run,
)
