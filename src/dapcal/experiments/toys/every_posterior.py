"""Every posterior on both toy problems, before and after it is adjusted to distance."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dapcal import ood_inputs
from dapcal.calibrate import Calibrated, calibrate
from dapcal.experiments.plots import BLUE, GREY, ORANGE, RED, mesh, new_grid, style
from dapcal.experiments.records import Experiment, Outcome, Picture, Run, environment, one_thread
from dapcal.experiments.toys import sinusoid, two_moons
from dapcal.likelihoods import Bernoulli, Gaussian, Likelihood
from dapcal.ood_inputs import OODInputs
from dapcal.posteriors import dropout, ensemble, hmc, laplace, sgmcmc, swag, variational, vogn
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors.network import NetworkPosterior
from dapcal.predictive import Prediction
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
        ("two moons", _moons(seed), _measure_moons, _draw_moons, _MOONS),
        ("sinusoid", _waves(seed), _measure_waves, _draw_waves, _WAVES),
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
                panels.append((method, calibrated(_grid(name))))
            found[method]["warnings"] = sorted({str(w.message) for w in caught})
            progress(name, step + 1, len(METHODS))
        numbers[name] = found
        pictures.append(Picture(name.replace(" ", "-"), _figure(panels, problem, draw), caption))
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


def _grid(name: str) -> Tensor:
    if name == "two moons":
        return mesh(two_moons.LOW, two_moons.HIGH, 101)[0]
    return torch.linspace(-12, 12, 301)[:, None]


def _measure_moons(calibrated: Calibrated, problem: Problem) -> dict[str, Any]:
    (x, y), grid = problem.held_out, _grid("two moons")
    far = torch.cdist(grid, problem.train[0]).min(1).values > two_moons.FAR
    inside, outside = calibrated(x), calibrated(grid[far])
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


def _figure(panels: list[tuple[str, Prediction]], problem: Problem, draw: Callable[..., Any]) -> Any:
    """Pairs of rows: the posterior alone, and below it with dapcal's default."""
    columns = 6
    with style():
        figure, axes = new_grid(2 * -(-len(panels) // columns), columns, 1.75, 1.6)
        for place, (title, prediction) in enumerate(panels):
            row, column = 2 * (place // columns), place % columns
            for offset, shown in enumerate((prediction.base, prediction)):
                panel = axes[row + offset][column]
                image = draw(panel, shown, problem)
                panel.tick_params(labelsize=6)
                if column == 0:
                    panel.set_ylabel(("alone", "with distance")[offset], fontsize=8)
            axes[row][column].set_title(title, fontsize=8)
        if image is not None:
            figure.colorbar(image, ax=[panel for row in axes for panel in row], label="confidence", shrink=0.5)
    return figure


def _draw_moons(axes: Any, prediction: Prediction, problem: Problem) -> Any:
    side = round(len(prediction.probs) ** 0.5)
    image = axes.imshow(
        prediction.probs.max(-1).values.double().reshape(side, side).T.numpy(), origin="lower", cmap="viridis",
        extent=(two_moons.LOW[0], two_moons.HIGH[0], two_moons.LOW[1], two_moons.HIGH[1]), vmin=0.5, vmax=1.0,
    )  # fmt: skip
    x, y = problem.train
    for label, colour in ((0, "white"), (1, ORANGE)):
        axes.scatter(*x[y == label].T.numpy(), s=0.6, c=colour, lw=0)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return image


def _draw_waves(axes: Any, prediction: Prediction, problem: Problem) -> None:
    x, mean, half = _grid("sinusoid")[:, 0], prediction.mean[:, 0], sinusoid.band(prediction)
    axes.fill_between(x, mean - half, mean + half, color=BLUE, alpha=0.25, lw=0)
    axes.plot(x, x.sin(), color=GREY, lw=0.5, ls="--")
    axes.plot(x, mean, color=BLUE, lw=1)
    axes.scatter(*(t[:, 0].numpy() for t in problem.train), s=1, c=RED, lw=0, alpha=0.5)
    axes.set(ylim=(-4, 4), xlim=(-12, 12))


_MOONS = (
    "Confidence on two moons of twelve posteriors, each alone and with dapcal's default. Most are sure far from the "
    "data; with distance they fall to one half there and stay as they were on the moons."
)
_WAVES = (
    "Prediction and 95 % epistemic band on the sinusoid of twelve posteriors, each alone and with dapcal's default. "
    "Bands open between and beyond the clusters where their variance was under ten times that at the training inputs."
)

EXPERIMENT = Experiment(
    title="Every posterior",
    text="Both toy problems with every way of getting a posterior, one seed and no tuning per method; calibrated with "
    "all defaults on draws from Gaussians just outside the data.",
    run=run,
)
