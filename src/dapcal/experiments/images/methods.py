"""The rows of the image tables: every method, from a bench to what it says of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dapcal.adjust import MomentMatched, Reweight, Transport
from dapcal.calibrate import Calibrated, calibrate
from dapcal.detectors import dac, ddu, due, duq, fdbd, gapa, knn, logits, mahalanobis, odin, sngp, temperature, vim
from dapcal.ensembles import seen
from dapcal.experiments.images.bench import Bench, Readout
from dapcal.experiments.records import curve_numbers
from dapcal.posteriors.network import NetworkPosterior
from dapcal.predictive import Prediction
from dapcal.types import Posterior

PARTS = {
    "paper": "The paper's rows",
    "ours": "Our default, on several posteriors",
    "posteriors": "Those posteriors alone",
    "newer": "Newer scores of the MAP network",
    "questions": "The paper's open questions",
    "oracle": "φ calibrated on the OOD set itself (an oracle)",
    "trained": "Networks trained for it",
}
"""Parts of the table, in the order of the page."""


class Answer(NamedTuple):
    """What a method says of N inputs."""

    scores: dict[str, Tensor]  # each (N,), higher = further out
    log_probs: Tensor | None = None  # (N, K); the paper's do not sum to one
    weights: dict[str, Tensor] = {}  # noqa: RUF012  diagnostics of importance weights, each (N,)


class Fitted(NamedTuple):
    """A method ready to answer, and what was found on the way (φ, temperatures, …)."""

    answer: Callable[[Tensor], Answer]
    facts: dict[str, Any] = {}  # noqa: RUF012


class Method(NamedTuple):
    """A row: which part of the table it belongs to, and how it is fitted."""

    part: str
    fit: Callable[[Bench], Fitted]
    score: str  # the score that its authors use, or that we do


def posterior_alone(posterior: Posterior) -> Fitted:
    """Predictive entropy, confidence and mutual information of a posterior as it is."""

    def answer(x: Tensor) -> Answer:
        likelihood, base = posterior.likelihood, seen(posterior, x)
        log_probs = likelihood.log_mean(base)  # type: ignore[attr-defined]
        entropy = likelihood.entropy(base)
        scores = {
            "entropy": entropy,
            "confidence": doubt(log_probs),
            "epistemic": entropy - likelihood.expected_entropy(base),
        }
        return Answer(scores, log_probs)

    return Fitted(answer)


def adjusted(calibrated: Calibrated, **facts: Any) -> Fitted:
    """Everything that a calibrated posterior says."""

    def answer(x: Tensor) -> Answer:
        prediction: Prediction = calibrated(x)
        log_probs = prediction.likelihood.log_mean(prediction.ensemble)  # type: ignore[attr-defined]
        scores = {
            "OOD score": prediction.ood_score,
            "entropy": prediction.entropy,
            "confidence": doubt(log_probs),
            "epistemic": prediction.mutual_information,
            "distance": prediction.pre_distance,
            "p-value": -prediction.ood_p_value,
        }
        weighted = isinstance(calibrated.adjust, Reweight | MomentMatched)
        return Answer(scores, log_probs, _weights(prediction) if weighted else {})

    found = {"phi": calibrated.phi, "notes": list(calibrated.notes), "curve": curve_numbers(calibrated.curve)}
    return Fitted(answer, found | facts)


def doubt(log_probs: Tensor) -> Tensor:
    """−log of the largest probability: the order of one minus it, without ties where it is nearly 1 or far under it."""
    top = log_probs.max(-1).values
    others = log_probs.scatter(-1, log_probs.argmax(-1, keepdim=True), -torch.inf).logsumexp(-1)
    proper = log_probs.logsumexp(-1).abs() < 1e-9
    return torch.where(proper, torch.log1p((others - top).exp()), -top)


def paper(bench: Bench, adjust: Reweight, posterior: NetworkPosterior, point: NetworkPosterior) -> Calibrated:
    """The paper's estimator: importance weights, no guard, no radius, features of a MAP network as projector."""
    return calibrate(
        posterior, train=bench.train, held_out=bench.held_out, ood=bench.wrong(posterior),
        distance=bench.features_of(point), adjust=adjust, guard=None,
    )  # fmt: skip


def ours(bench: Bench, posterior: Posterior, **options: Any) -> Calibrated:
    """Our default."""
    options.setdefault("distance", bench.measured(posterior))
    return calibrate(posterior, train=bench.train, held_out=bench.held_out, **options)


def _weights(prediction: Prediction) -> dict[str, Tensor]:
    found = prediction.diagnostics
    return {"total weight": found.total_weight, "ESS": found.ess, "Pareto k": found.pareto_k}


def scored(fit: Callable[[Bench], Any], *facts: str) -> Callable[[Bench], Fitted]:
    """A detector: one score, and probabilities where it has some."""
    return lambda bench: _detecting(fit(bench), lambda x: x, facts)


def read_out(fit: Callable[[Readout], Any], *facts: str) -> Callable[[Bench], Fitted]:
    """A detector of the MAP network's features."""

    def fitted(bench: Bench) -> Fitted:
        readout = bench.readout
        return _detecting(fit(readout), readout.at, facts)

    return fitted


def _detecting(detector: Any, at: Callable[[Tensor], Tensor], facts: Sequence[str]) -> Fitted:
    probs = getattr(detector, "probs", None)

    def answer(x: Tensor) -> Answer:
        seen_as = at(x)
        log_probs = None if probs is None else probs(seen_as).double().clamp_min(1e-300).log()
        return Answer({"score": detector(seen_as)}, log_probs)

    return Fitted(answer, {name: getattr(detector, name) for name in facts})


def _trained(fit: Callable[..., Any], name: str) -> Callable[[Bench], Fitted]:
    def trained(bench: Bench) -> Any:
        body = bench.network(bench.seed)[:-1]  # type: ignore[index]
        options = bench.options(name)
        del options["learning_rate"]  # each has its own
        return fit(body, 10, bench.train, seed=bench.seed, **options)

    return scored(trained)


def _with_more_draws(bench: Bench) -> Fitted:
    posterior = bench.variational
    assert posterior.gaussian is not None
    generator = torch.Generator().manual_seed(bench.seed)
    more = replace(posterior, draws=posterior.gaussian.sample(10 * bench.task.draws, generator))
    return adjusted(paper(bench, Reweight(), more, bench.map), draws=10 * bench.task.draws)


def _matched(bench: Bench) -> Fitted:
    """Draws moved for every distance: too dear to search φ with, so the paper's φ serves."""
    calibrated = paper(bench, Reweight(), bench.variational, bench.map)
    return adjusted(replace(calibrated, adjust=MomentMatched()))


def _oracle(kind: str, name: str) -> Callable[[Bench], Fitted]:
    def fit(bench: Bench) -> Fitted:
        generator = torch.Generator().manual_seed(bench.seed)
        rows = torch.randperm(len(bench.outside[name]), generator=generator)[:1000].to(bench.device)
        images = bench.outside[name][rows]
        if kind == "ours":
            return adjusted(ours(bench, bench.variational, ood=images))
        return adjusted(
            calibrate(
                bench.variational, train=bench.train, held_out=bench.held_out, ood=images,
                distance=bench.features_of(bench.map), adjust=Reweight(), guard=None,
            )
        )  # fmt: skip

    return fit


def methods(outside: tuple[str, ...]) -> dict[str, Method]:
    """All rows, in the order in which they are made; the paper's first."""
    return {
        **_PAPER,
        **_OURS,
        **_POSTERIORS,
        **_SCORES,
        **_QUESTIONS,
        **{
            f"{label}, φ from {name}": Method("oracle", _oracle(kind, name), score)
            for name in outside
            for kind, label, score in (("paper", "DAP, paper's", "confidence"), ("ours", "DAP, ours", "OOD score"))
        },
        **_TRAINED,
    }


_PAPER = {
    "MAP": Method("paper", lambda b: posterior_alone(b.map), "entropy"),
    "ODIN": Method("paper", scored(lambda b: odin.fit(b.map.network, b.held_out), "temperature", "epsilon"), "score"),
    "DDU": Method("paper", read_out(lambda r: ddu.fit(r.network, r.train)), "score"),
    "DE": Method("paper", lambda b: posterior_alone(b.ensemble), "entropy"),
    "VI": Method("paper", lambda b: posterior_alone(b.variational), "entropy"),
    "DAP, paper's": Method("paper", lambda b: adjusted(paper(b, Reweight(), b.variational, b.map)), "confidence"),
}
_OURS = {
    "DAP, ours": Method("ours", lambda b: adjusted(ours(b, b.variational)), "OOD score"),
    "DAP, ours, by Transport": Method(
        "ours", lambda b: adjusted(ours(b, b.variational, adjust=Transport(step=0.25), candidates=30)), "OOD score"
    ),
    "DE + DAP, ours": Method("ours", lambda b: adjusted(ours(b, b.ensemble)), "OOD score"),
    "Laplace + DAP, ours": Method("ours", lambda b: adjusted(ours(b, b.laplace)), "OOD score"),
    "SWAG + DAP, ours": Method("ours", lambda b: adjusted(ours(b, b.swag)), "OOD score"),
    "MC dropout + DAP, ours": Method("ours", lambda b: adjusted(ours(b, b.dropout)), "OOD score"),
}
_POSTERIORS = {
    "Laplace, last layer": Method("posteriors", lambda b: posterior_alone(b.laplace), "entropy"),
    "SWAG": Method("posteriors", lambda b: posterior_alone(b.swag), "entropy"),
    "MC dropout": Method("posteriors", lambda b: posterior_alone(b.dropout), "entropy"),
}
_SCORES = {
    "max softmax": Method("newer", read_out(lambda r: logits.max_softmax(r.network)), "score"),
    "max logit": Method("newer", read_out(lambda r: logits.max_logit(r.network)), "score"),
    "energy": Method("newer", read_out(lambda r: logits.energy(r.network)), "score"),
    "temperature scaling": Method(
        "newer", read_out(lambda r: temperature.fit(r.network, r.held_out), "temperature"), "score"
    ),
    "kNN, features": Method("newer", read_out(lambda r: knn.fit(r.network, r.train, unit=False)), "score"),
    "kNN, normalised features": Method("newer", read_out(lambda r: knn.fit(r.network, r.train)), "score"),
    "Mahalanobis": Method("newer", read_out(lambda r: mahalanobis.fit(r.network, r.train)), "score"),
    "Mahalanobis++": Method("newer", read_out(lambda r: mahalanobis.fit(r.network, r.train, unit=True)), "score"),
    "ViM": Method("newer", read_out(lambda r: vim.fit(r.network, r.train)), "score"),
    "fDBD": Method("newer", read_out(lambda r: fdbd.fit(r.network, r.train)), "score"),
    "DAC": Method("newer", scored(lambda b: dac.fit(b.map.network, b.train, b.held_out)), "score"),
    "GAPA": Method("newer", read_out(lambda r: gapa.fit(r.network, r.train)), "score"),
}
_QUESTIONS = {
    "DDU, spectral": Method("questions", scored(lambda b: ddu.fit(b.spectral.network, b.train)), "score"),
    "DAP, ours, after temperature": Method(
        "questions", lambda b: adjusted(ours(b, b.variational, temperature=True)), "OOD score"
    ),
    "VI, spectral": Method("questions", lambda b: posterior_alone(b.spectral_variational), "entropy"),
    "DAP, ours, spectral": Method("questions", lambda b: adjusted(ours(b, b.spectral_variational)), "OOD score"),
    "DAP, paper's, spectral": Method(
        "questions", lambda b: adjusted(paper(b, Reweight(), b.spectral_variational, b.spectral)), "confidence"
    ),
    "DAP, paper's, features of VI": Method(
        "questions", lambda b: adjusted(paper(b, Reweight(), b.variational, b.variational)), "confidence"
    ),
    "DAP, paper's, Pareto-smoothed": Method(
        "questions", lambda b: adjusted(paper(b, Reweight(smooth=True), b.variational, b.map)), "confidence"
    ),
    "DAP, paper's, moments matched": Method("questions", _matched, "confidence"),
    "DAP, paper's, ten times the draws": Method("questions", _with_more_draws, "confidence"),
    "DAP, paper's, completed": Method(
        "questions", lambda b: adjusted(paper(b, Reweight(complete=True), b.variational, b.map)), "entropy"
    ),
}
_TRAINED = {
    "SNGP": Method("trained", _trained(sngp.fit, "sngp"), "score"),
    "DUQ": Method("trained", _trained(duq.fit, "duq"), "score"),
    "DUE": Method("trained", _trained(due.fit, "due"), "score"),
}
