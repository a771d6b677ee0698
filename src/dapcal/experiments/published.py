"""The paper's tables, as data, to be set beside ours; commented ones are in the paper's source alone."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A row of an image table, in per cent."""

    accuracy: float | None
    detection: dict[str, tuple[float, float]]  # AUROC and AUCPR by OOD set


IMAGES = {
    "mnist": {
        "MAP": Published(96.40, {"Fashion-MNIST": (87.65, 87.77), "SVHN": (92.38, 95.26), "Omniglot": (89.58, 90.65)}),
        "ODIN": Published(None, {"Fashion-MNIST": (89.50, 86.42), "SVHN": (97.10, 94.85), "Omniglot": (90.15, 87.49)}),
        "DDU": Published(None, {"Fashion-MNIST": (94.35, 95.53), "SVHN": (91.41, 90.07), "Omniglot": (92.85, 92.66)}),
        "DE": Published(97.24, {"Fashion-MNIST": (90.56, 88.82), "SVHN": (93.09, 96.54), "Omniglot": (94.70, 95.23)}),
        "VI": Published(96.62, {"Fashion-MNIST": (87.90, 89.76), "SVHN": (98.46, 98.96), "Omniglot": (89.96, 91.06)}),
        "DAP, paper's": Published(
            96.57, {"Fashion-MNIST": (96.25, 96.44), "SVHN": (98.85, 97.99), "Omniglot": (95.24, 95.14)}
        ),
    },
    "fashion-mnist": {
        "MAP": Published(89.39, {"MNIST": (67.65, 67.49)}),
        "ODIN": Published(None, {"MNIST": (71.22, 64.79)}),
        "DDU": Published(None, {"MNIST": (99.66, 99.73)}),
        "DE": Published(91.34, {"MNIST": (91.69, 91.92)}),
        "VI": Published(89.66, {"MNIST": (70.31, 71.98)}),
        "DAP, paper's": Published(89.66, {"MNIST": (99.70, 99.76)}),
    },
    "cifar10": {
        "MAP": Published(95.40, {"SVHN": (94.91, 97.16), "CIFAR-100": (88.41, 86.70)}),
        "ODIN": Published(None, {"SVHN": (94.55, 92.12), "CIFAR-100": (88.26, 88.20)}),
        "DDU": Published(None, {"SVHN": (97.04, 94.91), "CIFAR-100": (90.60, 91.13)}),
        "DE": Published(96.14, {"SVHN": (95.79, 97.72), "CIFAR-100": (90.94, 91.01)}),
        "VI": Published(95.24, {"SVHN": (96.73, 98.33), "CIFAR-100": (90.70, 88.68)}),
        "DAP, paper's": Published(95.24, {"SVHN": (95.24, 94.23), "CIFAR-100": (90.95, 91.87)}),
    },
}
EARLIER = {  # tables that the paper's source keeps, commented out, from an earlier run
    "fashion-mnist": {
        "MAP": Published(91.28, {"MNIST": (80.44, 78.60)}),
        "ODIN": Published(None, {"MNIST": (82.53, 82.51)}),
        "DDU": Published(91.28, {"MNIST": (92.29, 94.50)}),
        "DE": Published(91.63, {"MNIST": (89.63, 89.58)}),
        "VI": Published(91.72, {"MNIST": (87.24, 88.09)}),
        "DAP, paper's": Published(91.72, {"MNIST": (98.31, 98.69)}),
    },
}
PHI = {"two-moons": -4.85, "mnist": -8.79, "fashion-mnist": -10.45, "cifar10": -14.37}
"""Of DAP; those of images are commented out in the paper's source."""
UCI_GAP = {  # test log-likelihood, mean and standard error; commented out, the paper has a figure of it
    "boston": {"MAP": (-4.09, 0.52), "VI": (-3.18, 0.19), "VI + paper": (-3.14, 0.19)},
    "concrete": {"MAP": (-3.91, 0.14), "VI": (-3.76, 0.09), "VI + paper": (-3.72, 0.08)},
    "energy": {"MAP": (-16.69, 6.53), "VI": (-3.12, 0.54), "VI + paper": (-3.12, 0.54)},
    "naval": {"MAP": (-31.71, 6.89), "VI": (-144.71, 23.36), "VI + paper": (-6.31, 1.69)},
    "wine": {"MAP": (-1.03, 0.05), "VI": (-0.925, 0.02), "VI + paper": (-0.925, 0.02)},
}
