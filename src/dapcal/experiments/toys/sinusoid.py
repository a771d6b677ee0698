"""Sinusoid: a regression whose error band opens between and beyond two clusters of inputs (paper, section 5.1)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from dapcal.calibrate import Calibrated
from dapcal.calibration import inputs as ood_inputs
from dapcal.distances import Space
from dapcal.distances.projectors import Identity
from dapcal.experiments.plots import BLUE, GREY, RED, calibration_panel, new_figure, style
from dapcal.experiments.records import (
    Experiment,
    Outcome,
    Picture,
    Run,
    curve_numbers,
    epochs_of,
    one_thread,
)
from dapcal.experiments.toys.comparison import ours_and_papers
from dapcal.experiments.toys.seeds import OneSeed, over_seeds
from dapcal.likelihoods import MeanAndNoise, NoiseHead
from dapcal.posteriors import laplace
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors.network import NetworkPosterior
from dapcal.predictive import Prediction
from dapcal.progress import Stages
from dapcal.types import DapcalWarning

POINTS, CENTERS, DEVIATION, NOISE, WIDTH, DRAWS = 1000, (-5.0, 5.0), 0.8, 0.1, 16, 100
MAP_EPOCHS = 200
PROBES = (-10.0, 0.0, 10.0)
CORE = 1.5  # standard deviations around a center that count as inside its cluster (87 % of the inputs)


def waves(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy sin(x) at inputs from two Gaussian clusters."""
    center = torch.tensor(CENTERS)[torch.arange(n) % 2]
    x = (center + DEVIATION * torch.randn(n, generator=generator))[:, None]
    return x, x.sin() + NOISE * torch.randn(n, 1, generator=generator)


@one_thread()
def run(this: Run) -> Outcome:
    """Diagonal Laplace approximation of a mean and a noise network, distance-aware in the mean network alone."""
    settings = {
        "points": POINTS, "centers": CENTERS, "deviation": DEVIATION, "noise": NOISE, "draws": DRAWS,
        "network": f"mean 1-{WIDTH}-{WIDTH}-1 SiLU, noise 1-10-1 ReLU", "sigma0": 1.0,
        "map_epochs": MAP_EPOCHS, "posterior": "Laplace, diagonal Gauss-Newton, linearised",
    }  # fmt: skip
    return over_seeds("sinusoid", settings, this, _one)


def _one(this: Run) -> OneSeed:
    seed, progress = this.seed, this.progress
    generator = torch.Generator().manual_seed(seed)
    train, held_out = waves(POINTS, generator), waves(POINTS, generator)
    point = fit_map(train, seed, progress)
    posterior = laplace.fit(
        point.network, point.likelihood, train, structure=laplace.Diagonal, draws=DRAWS, seed=seed, aware="mean.*"
    )
    outside = just_outside(train[0], seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DapcalWarning)
        space = Space(Identity(), radius=None, name="inputs")
        ours, papers = ours_and_papers(posterior, train, held_out, outside, space, progress)
        numbers: dict[str, Any] = {
            "ours": _measure(ours, train, held_out),
            "paper": _measure(papers, train, held_out),
        }
    numbers["warnings"] = sorted({str(w.message) for w in caught})
    return OneSeed(numbers, lambda: _pictures(ours, papers, train, progress))


def just_outside(x: Tensor, seed: int) -> ood_inputs.Around:
    """Draws from Gaussians beyond both ends of the inputs, and between the clusters."""
    centers = torch.stack([x.min() - 0.3, torch.zeros(()), x.max() + 0.3])[:, None]
    return ood_inputs.Around(centers, deviation=0.1, seed=seed)


def mean_and_noise(seed: int) -> MeanAndNoise:
    """A network for the mean and one for the noise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mean = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))
        noise = nn.Sequential(nn.Linear(1, 10), nn.ReLU(), nn.Linear(10, 1))
    return MeanAndNoise(mean, noise)


def fit_map(train: tuple[Tensor, Tensor], seed: int, progress: Stages) -> NetworkPosterior:
    """The trained network."""
    return map_posterior.fit(
        mean_and_noise(seed), NoiseHead(), train, epochs=MAP_EPOCHS, learning_rate=1e-2, batch_size=125,
        seed=seed, aware="mean.*", progress=epochs_of(progress, "MAP network"),
    )  # fmt: skip


def band(prediction: Prediction) -> Tensor:
    """Half width of the 95 % epistemic band, (N,)."""
    return 1.96 * prediction.epistemic[:, 0].sqrt()


def _measure(calibrated: Calibrated, train: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]) -> dict[str, Any]:
    probes, inside, held = calibrated(torch.tensor(PROBES)[:, None]), calibrated(train[0]), calibrated(held_out[0])
    typical = band(inside).quantile(0.95)
    core = torch.linspace(-CORE * DEVIATION, CORE * DEVIATION, 200)
    clusters = calibrated((torch.tensor(CENTERS)[:, None] + core).reshape(-1, 1))
    widening = band(clusters) / band(clusters.base)
    y = held_out[1]
    diagnostics = probes.diagnostics
    return {
        "phi": calibrated.phi,
        "notes": list(calibrated.notes),
        "probes": PROBES,
        "band_over_training_q95": [(band(probes.base) / typical).tolist(), (band(probes) / typical).tolist()],
        "band_widening_in_clusters_mean_max": [float(widening.mean()), float(widening.max())],
        "held_out_nll": [float(-held.base.log_prob(y).mean()), float(-held.log_prob(y).mean())],
        "held_out_nll_mixture": [float(-held.base.log_prob_mixture(y).mean()), float(-held.log_prob_mixture(y).mean())],
        "held_out_rmse": [_rmse(held.base, y), _rmse(held, y)],
        "probe_total_weight": diagnostics.total_weight.tolist(),
        "probe_ess": diagnostics.ess.tolist(),
        "contracted_parameters": diagnostics.contracted,
        "curve": curve_numbers(calibrated.curve),
    }  # fmt: skip


def _rmse(prediction: Prediction, y: Tensor) -> float:
    return float(((prediction.mean - y) ** 2).mean().sqrt())


def _pictures(ours: Calibrated, papers: Calibrated, train: tuple[Tensor, Tensor], progress: Stages) -> list[Picture]:
    with warnings.catch_warnings(), style():
        warnings.simplefilter("ignore", DapcalWarning)  # recorded above
        x = torch.linspace(-12, 12, 601)[:, None]
        mine, theirs = ours(x), papers(x)
        first, axes = new_figure(3)
        panels = (
            ("Laplace approximation", mine.base),
            ("with the paper's estimator", theirs),
            ("with dapcal's default", mine),
        )
        for panel, (title, prediction) in zip(axes, panels, strict=True):
            _bands(panel, x[:, 0], prediction, train, title)
        axes[0].legend(fontsize=7, loc="upper left", markerscale=3)
        progress("figures", 1, 2)
        second, axes = new_figure(2, width=4.6, height=3.7)
        calibration_panel(axes[0], papers, "the paper's estimator")
        calibration_panel(axes[1], ours, "dapcal's default, guarded")
        progress("figures", 2, 2)
    return [
        Picture(
            "band", first,
            "Prediction and 95 % epistemic band of a Laplace approximation, before and after adjusting it to distance. "
            "The default leaves the clusters alone and opens the band between and beyond them.",
        ),
        Picture(
            "calibration", second,
            "Calibration loss over φ: how far the epistemic variance just outside the data is from ten times its 95 % "
            "quantile on the training inputs. The guard refuses every φ that would cost more than 0.01 nats.",
        ),
    ]  # fmt: skip


def _bands(axes: Any, x: Tensor, prediction: Prediction, train: tuple[Tensor, Tensor], title: str) -> None:
    mean, half = prediction.mean[:, 0], band(prediction)
    axes.fill_between(x, mean - half, mean + half, color=BLUE, alpha=0.22, lw=0, label="95 % epistemic band")
    axes.plot(x, x.sin(), color=GREY, lw=0.8, ls="--", label="sin(x)")
    axes.plot(x, mean, color=BLUE, lw=1.4, label="prediction")
    axes.scatter(*(t[:, 0].numpy() for t in train), s=3, c=RED, lw=0, alpha=0.5, label="training data")
    axes.set(title=title, xlabel="x", ylim=(-4, 4), xlim=(-12, 12))


EXPERIMENT = Experiment(
    title="Sinusoid",
    text="1000 points at inputs from two Gaussians at −5 and 5, a mean and a noise network with a standard-normal "
    "prior, distance-aware in the mean network alone. A Laplace approximation with a diagonal Gauss–Newton "
    "precision, whose weights have a closed form, seen through the linearised network.",
    run=run,
    options=("seeds",),
)
