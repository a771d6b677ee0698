"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from cases import coarsely
from dapcal.likelihoods import Categorical
from dapcal.posteriors import gaussian

gc.set_threshold(100_000, 20, 20)  # not every 700 objects: torch and what else is imported have millions
torch.set_num_threads(1)  # small tensors: threads that wait for each other cost more than they give
os.environ["OMP_NUM_THREADS"] = "1"  # so in processes that tests start
if not torch.cuda.is_available():  # torch's own keeps a call stack for every kind of device that is not there
    torch.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded():
    """Every test draws from the same global generator, and leaves it as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


COARSE = frozenset(
    f"test_{name}"
    for name in (
        "against_targets", "any_network", "architectures", "artifact", "bad_input", "calibrated", "class_gaussian",
        "cli_networks", "cli_serve", "cli_tables", "cli_tables_refused", "cli_targets", "column_effects", "contract",
        "cifar", "counts", "deploy", "dropout", "ensemble", "evidence", "excel", "explain", "hostile_tables", "inputs",
        "invariance", "members", "network_model", "no_harm", "one_pass", "plain_network",
        "recipes", "report", "report_page", "revert", "sgmcmc", "signing", "sklearn", "sklearn_frames", "swag",
        "table_model", "trained_detectors", "uci_gap", "unusable", "unusual", "vogn",
    )
)  # fmt: skip
"""Files whose tests are about what comes before and after the search for φ, which tries few values there."""


@pytest.fixture(autouse=True, scope="module")
def _coarsely(request: pytest.FixtureRequest):
    with coarsely(12) if request.module.__name__ in COARSE else nullcontext():
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def classifier() -> nn.Module:
    """A small fixed network with three classes on two inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture
def posterior(classifier: nn.Module):
    """A diagonal Gaussian posterior around that network."""
    scale = {n: torch.full_like(p, 0.3) for n, p in classifier.named_parameters()}
    return gaussian.diagonal(classifier, Categorical(), scale, draws=30, seed=1)


@pytest.fixture
def blobs(generator: torch.Generator):
    """Three clusters of labelled points: train (150) and held-out (120)."""
    centers = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])

    def draw(n: int):
        y = torch.arange(n) % 3
        return centers[y] + 0.4 * torch.randn(n, 2, generator=generator), y

    return draw(150), draw(120)


@pytest.fixture(scope="session")
def houses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.csv, new.csv, and house.dap as `dapcal fit` writes it; tests write elsewhere."""
    from table_cases import write_houses

    return write_houses(tmp_path_factory.mktemp("houses"))
