"""Two moons: a classifier that is sure on the moons and unsure away from them (paper, section 5.1)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from dapcal.calibrate import Calibrated
from dapcal.calibration import inputs as ood_inputs
from dapcal.distances import Space
from dapcal.distances.projectors import Features
from dapcal.experiments.plots import ORANGE, calibration_panel, mesh, new_figure, style
from dapcal.experiments.published import PHI
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
from dapcal.likelihoods import Bernoulli
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors import variational
from dapcal.predictive import Prediction
from dapcal.progress import Stages
from dapcal.types import DapcalWarning

POINTS, NOISE, WIDTH, DRAWS = 1000, 0.07, 20, 100
MAP_EPOCHS, VI_EPOCHS, VI_SAMPLES = 100, 2000, 8
FAR = 2.5  # "away from the data": further than this from every training point
LOW, HIGH = (-4.5, -4.5), (5.5, 5.0)
PUBLISHED_PHI = PHI["two-moons"]


def moons(n: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two interleaving half circles with Gaussian noise, and which one a point belongs to."""
    angle = math.pi * torch.rand(n, generator=generator)
    y = torch.arange(n) % 2
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    x = torch.where(y[:, None] == 0, upper, lower)
    return x + noise * torch.randn(n, 2, generator=generator), y


@one_thread()
def run(this: Run) -> Outcome:
    """Variational posterior, the paper's estimator and our default on the same OOD inputs, under every seed."""
    settings = {
        "points": POINTS, "noise": NOISE, "network": f"2-{WIDTH}-{WIDTH}-1 tanh", "draws": DRAWS,
        "sigma0": 1.0, "kl_weight": 1.0, "map_epochs": MAP_EPOCHS, "vi_epochs": VI_EPOCHS,
        "vi_samples": VI_SAMPLES, "far": FAR,
    }  # fmt: skip
    return over_seeds("two-moons", settings, this, _one)


def _one(this: Run) -> OneSeed:
    seed, progress = this.seed, this.progress
    generator = torch.Generator().manual_seed(seed)
    train, held_out = moons(POINTS, NOISE, generator), moons(POINTS, NOISE, generator)
    posterior = _fit(train, seed, progress)
    around = ood_inputs.Around(deviation=0.1, seed=seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DapcalWarning)
        space = Space(Features(), radius=None, name="features")
        ours, papers = ours_and_papers(posterior, train, held_out, around, space, progress)
        grid, shape = mesh(LOW, HIGH, 161)
        far = torch.cdist(grid, train[0]).min(1).values > FAR
        numbers: dict[str, Any] = {
            "ours": _measure(ours, held_out, grid, far),
            "paper": _measure(papers, held_out, grid, far) | {"published_phi": PUBLISHED_PHI},
        }
    numbers["warnings"] = sorted({str(w.message) for w in caught})
    return OneSeed(numbers, lambda: _pictures(ours, papers, grid, shape, train, progress))


def papers_epistemic(prediction: Prediction) -> Tensor:
    """Σ_k E[w p_k²] − E[w p_k]², the variance of the predictive mean as the paper's weights give it, (N,)."""
    both = prediction.expect(lambda z: torch.cat([torch.sigmoid(-z), torch.sigmoid(z)], -1))
    squares = prediction.expect(lambda z: torch.sigmoid(-z) ** 2 + torch.sigmoid(z) ** 2)
    return squares[:, 0] - (both**2).sum(-1)


def _fit(train: tuple[Tensor, Tensor], seed: int, progress: Stages) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
    model = nn.Sequential(*layers)
    point = map_posterior.fit(
        model, Bernoulli(), train, epochs=MAP_EPOCHS, learning_rate=1e-2, batch_size=250, seed=seed,
        progress=epochs_of(progress, "MAP network"),
    )  # fmt: skip
    return variational.fit(
        point.network, point.likelihood, train, epochs=VI_EPOCHS, learning_rate=1e-2, batch_size=POINTS,
        samples=VI_SAMPLES, draws=DRAWS, seed=seed, progress=epochs_of(progress, "variational posterior"),
    )  # fmt: skip


def _measure(calibrated: Calibrated, held_out: tuple[Tensor, Tensor], grid: Tensor, far: Tensor) -> dict[str, Any]:
    x, y = held_out
    inside, outside = calibrated(x), calibrated(grid)
    diagnostics = outside.diagnostics
    quantiles = torch.tensor([0.05, 0.5, 0.95], dtype=diagnostics.ess.dtype)
    return {
        "phi": calibrated.phi,
        "notes": list(calibrated.notes),
        "held_out_accuracy": [_accuracy(inside.base, y), _accuracy(inside, y)],
        "held_out_nll": [float(-inside.base.log_prob(y).mean()), float(-inside.log_prob(y).mean())],
        "confidence_far_away": [_confidence(outside.base, far), _confidence(outside, far)],
        "grid_total_weight_q05_q50_q95": diagnostics.total_weight.quantile(quantiles).tolist(),
        "grid_ess_q05_q50_q95": diagnostics.ess.quantile(quantiles).tolist(),
        "contracted_parameters": diagnostics.contracted,
        "curve": curve_numbers(calibrated.curve),
    }


def _accuracy(prediction: Prediction, y: Tensor) -> float:
    return float((prediction.probs.argmax(-1) == y).double().mean())


def _confidence(prediction: Prediction, where: Tensor) -> float:
    return float(prediction.probs.max(-1).values[where].mean())


def _pictures(
    ours: Calibrated,
    papers: Calibrated,
    grid: Tensor,
    shape: tuple[int, int],
    train: tuple[Tensor, Tensor],
    progress: Stages,
) -> list[Picture]:
    with warnings.catch_warnings(), style():
        warnings.simplefilter("ignore", DapcalWarning)  # recorded above
        mine, theirs = ours(grid), papers(grid)
        first, axes = new_figure(3)
        titles = ["variational posterior", "with the paper's estimator", "with dapcal's default"]
        fields = [mine.base.epistemic, papers_epistemic(theirs), mine.epistemic]
        for panel, title, field in zip(axes, titles, fields, strict=True):
            image = _map(panel, field, shape, train, title, "magma", 0.0, 0.5)
        first.colorbar(image, ax=axes, label="epistemic variance", shrink=0.9)
        progress("figures", 1, 4)
        second, axes = new_figure(2)
        for panel, title, prediction in zip(axes, (titles[0], titles[2]), (mine.base, mine), strict=True):
            image = _map(panel, prediction.probs.max(-1).values, shape, train, title, "viridis", 0.5, 1.0)
        second.colorbar(image, ax=axes, label="confidence", shrink=0.9)
        progress("figures", 2, 4)
        third, axes = new_figure(2, width=4.6, height=3.7)
        calibration_panel(axes[0], papers, "the paper's estimator")
        axes[0].axvline(PUBLISHED_PHI, color="black", lw=0.8, ls="--")
        place = (PUBLISHED_PHI - 0.1, 0.97)
        label = axes[0].annotate(f"published φ = {PUBLISHED_PHI}", place, xycoords=("data", "axes fraction"))
        label.set(fontsize=7, rotation=90, ha="right", va="top")
        calibration_panel(axes[1], ours, "dapcal's default, guarded")
        progress("figures", 3, 4)
        fourth, axes = new_figure(2, width=4.4)
        weight = theirs.ensemble.log_weights.logsumexp(0) / math.log(10)
        image = _map(axes[0], weight, shape, train, "total weight W", "cividis", -6.0, 0.0)
        fourth.colorbar(image, ax=axes[0], label="log₁₀ W", shrink=0.9, extend="min")
        image = _map(axes[1], theirs.diagnostics.ess, shape, train, "effective draws", "cividis", 1.0, float(DRAWS))
        fourth.colorbar(image, ax=axes[1], label=f"ESS of {DRAWS}", shrink=0.9)
        progress("figures", 4, 4)
    return [
        Picture(
            "epistemic", first,
            "Epistemic variance of a variational posterior on two moons, before and after adjusting it to distance. "
            "The paper's importance weights raise it in places and lose their weight further out; the default raises "
            "it wherever there are no data.",
        ),
        Picture(
            "confidence", second,
            "Confidence of the prediction: the variational posterior is sure almost everywhere, also where it has seen "
            "nothing. With dapcal's default it stays sure on the moons and falls to one half away from them.",
        ),
        Picture(
            "calibration", third,
            "Calibration loss over φ, and the φ that was chosen. The guard refuses every φ that would cost more than "
            "0.01 nats of held-out log-likelihood.",
        ),
        Picture(
            "weights", fourth,
            "Why the paper's estimator is to be read with care: the total weight W that its probabilities sum to, and "
            "the effective number of draws. W falls under 1 with distance, and few draws carry what is left.",
        ),
    ]  # fmt: skip


def _map(
    axes: Any, field: Tensor, shape: tuple[int, int], train: tuple[Tensor, Tensor], title: str, colours: str,
    low: float, high: float,
) -> Any:  # fmt: skip
    image = axes.imshow(
        field.double().reshape(shape).T.numpy(), origin="lower", extent=(LOW[0], HIGH[0], LOW[1], HIGH[1]),
        cmap=colours, vmin=low, vmax=high, interpolation="bilinear",
    )  # fmt: skip
    x, y = train
    for label, colour in ((0, "white"), (1, ORANGE)):
        axes.scatter(*x[y == label].T.numpy(), s=2.5, c=colour, lw=0, alpha=0.8)
    axes.set(title=title, xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return image


EXPERIMENT = Experiment(
    title="Two moons",
    text="1000 points, a 2-20-20-1 network with a standard-normal prior and a mean-field variational posterior; "
    "calibrated on draws from Gaussians (standard deviation 0.1) just outside the data.",
    run=run,
    options=("seeds",),
)
