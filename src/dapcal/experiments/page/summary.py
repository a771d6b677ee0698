"""All methods over all pairs of image sets, as OpenOOD sums them up: one-network methods and ensembles apart.

See Zhang et al., "OpenOOD v1.5: Enhanced benchmark for out-of-distribution detection" (2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dapcal.experiments.page.cells import NOTHING, decimal, show, table
from dapcal.experiments.page.files import ImageResults
from dapcal.experiments.page.pairs import Compared, Pair, methods_of, of_pairs, of_sets, pairs_of, spread

KINDS = {False: "One trained network", True: "Ensembles"}


def section(images: Sequence[ImageResults]) -> Iterable[str]:
    """Both tables and what they mean."""
    pairs, sets = pairs_of(images), [found.settings["inside"] for found in images]
    methods = methods_of(images)
    for ensembles, title in KINDS.items():
        own = [method for method in methods if method.ensemble == ensembles]
        if own:
            yield f"### {title}: mean over all pairs"
            yield summary_table(own, pairs, sets)
            yield from _missing(own, pairs)
    near, far = ("; ".join(str(pair) for pair in pairs if pair.near == kind) for kind in (True, False))
    yield (
        f"Means over {len(pairs)} pairs of an in-distribution and an OOD set, of every method's main score, the "
        f"highest AUROC first; near: {near or 'none'}; far: {far or 'none'}. Accuracy, NLL and ECE are means over "
        f"{len(sets)} test sets; methods without probabilities have none. Errors are over seeds (none where a set has "
        f"a single one). Seconds to fit and score, in the order {', '.join(sets)}, of what is trained already, or from "
        "the start where a network is trained for the method; sets were run on different machines, so compare them "
        "within a set. A method with a pair missing has no mean over all, and stands last. “One trained network” "
        "includes posteriors that take several passes through one. Probabilities of the paper's estimator do not sum "
        "to one, which its NLL and ECE show."
    )


def summary_table(methods: Sequence[Compared], pairs: Sequence[Pair], sets: Sequence[str]) -> str:
    """One line for each method, the highest mean AUROC first, those with a pair missing last."""
    groups = {
        "": pairs,
        ", near": [pair for pair in pairs if pair.near],
        ", far": [pair for pair in pairs if not pair.near],
    }
    head = [f"{metric}{group}" for metric in ("AUROC", "FPR95") for group in groups]
    lines = [
        [
            method.name,
            f"{len(pairs) - len(method.missing(pairs))} of {len(pairs)}",
            *(show(of_pairs(method, own, metric), 1) for metric in ("auroc", "fpr95") for own in groups.values()),
            show(of_sets(method, sets, "nll"), 3),
            calibration_error(method, sets),
            show(of_sets(method, sets, "accuracy", 100), 1),
            seconds(method, sets),
        ]
        for method in ordered(methods, pairs)
    ]
    return table(["", "pairs", *head, "NLL", "ECE", "accuracy", "seconds"], lines)


def ordered(methods: Sequence[Compared], pairs: Sequence[Pair]) -> list[Compared]:
    """By mean AUROC over all pairs, the highest first; then those that have no such mean."""
    means = {method.name: of_pairs(method, pairs, "auroc") for method in methods}

    def place(method: Compared) -> tuple[bool, float]:
        found = means[method.name]
        return (found is None, 0.0 if found is None else -found.mean)

    return sorted(methods, key=place)


def calibration_error(method: Compared, sets: Sequence[str]) -> str:
    """Mean ECE in per cent; above 100 it is of probabilities that do not sum to one, and its size says nothing."""
    found = of_sets(method, sets, "ece", 100)
    return "over 100" if found is not None and found.mean > 100 else show(found, 1)


def seconds(method: Compared, sets: Sequence[str]) -> str:
    """Means over seeds, one for each in-distribution set."""
    found = [method.seconds(inside) for inside in sets]
    return " / ".join(decimal(spread(list(own.values())).mean, 1) if own else NOTHING for own in found)


def _missing(methods: Sequence[Compared], pairs: Sequence[Pair]) -> Iterable[str]:
    """Which methods lack which sets."""
    lacking: dict[str, list[str]] = {}
    for method in methods:
        if missing := method.missing(pairs):
            lacking.setdefault(_listed(missing, pairs), []).append(method.name)
    if lacking:
        listed = ". ".join(f"Without {what}: {'; '.join(names)}" for what, names in lacking.items())
        yield f"**Not measured on every pair, so without a mean over all.** {listed}."


def _listed(missing: Sequence[Pair], pairs: Sequence[Pair]) -> str:
    """Pairs in words; a set whose pairs are all missing is named once."""
    words: list[str] = []
    for inside in dict.fromkeys(pair.inside for pair in missing):
        own = [pair for pair in missing if pair.inside == inside]
        whole = len(own) == sum(pair.inside == inside for pair in pairs)
        words += [f"all of {inside}"] if whole else map(str, own)
    return ", ".join(words)
