"""The default on real images: sure of digits, unsure of clothes. Wants the folder that DAPCAL_DATA names."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import dapcal
from dapcal.likelihoods import Categorical

NEW = 2000  # images of each kind, one in five: the first of them are harder
FOLDER = os.environ.get("DAPCAL_DATA")
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="wants real data: set DAPCAL_DATA to a folder with mnist/ and fashion_mnist/"
)


def images(name: str, part: str) -> Tensor:
    raw = gzip.decompress((Path(FOLDER) / name / f"{part}-images-idx3-ubyte.gz").read_bytes())
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 1, 28, 28) / np.float32(255))


def labels(name: str, part: str) -> Tensor:
    raw = gzip.decompress((Path(FOLDER) / name / f"{part}-labels-idx1-ubyte.gz").read_bytes())
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=8).astype(np.int64))


@pytest.fixture(scope="module")
def calibrated():
    x, y = images("mnist", "train"), labels("mnist", "train")
    train, held_out = (x[:9000], y[:9000]), (x[50_000:51_200], y[50_000:51_200])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 10)
        )
    point = dapcal.posteriors.map.fit(model, Categorical(), train, epochs=9, learning_rate=3e-3)
    posterior = dapcal.posteriors.variational.fit(
        point.network, Categorical(), train, epochs=6, learning_rate=3e-3, initial_scale=0.05
    )
    return dapcal.calibrate(posterior, train=train, held_out=held_out)


@pytest.fixture(scope="module")
def digits(calibrated):
    return calibrated(images("mnist", "t10k")[::5])


def test_accuracy_and_likelihood_are_kept(digits):
    y = labels("mnist", "t10k")[::5]
    assert torch.equal(digits.probs.argmax(-1), digits.base.probs.argmax(-1))
    assert (digits.probs.argmax(-1) == y).double().mean() > 0.92
    assert -digits.log_prob(y).mean() < -digits.base.log_prob(y).mean() + 0.015


def test_clothes_are_told_from_digits(calibrated, digits):
    clothes = calibrated(images("fashion_mnist", "t10k")[::5])
    truth = np.r_[np.zeros(NEW), np.ones(NEW)]

    def auroc(digit_scores: Tensor, clothes_scores: Tensor) -> float:
        return roc_auc_score(truth, torch.cat([digit_scores, clothes_scores]).numpy())

    base = auroc(digits.base.entropy, clothes.base.entropy)
    assert auroc(digits.entropy, clothes.entropy) > base + 0.01
    assert auroc(digits.ood_score, clothes.ood_score) > 0.97
    assert (digits.ood_p_value <= 0.05).double().mean() < 0.08
    assert (clothes.ood_p_value <= 0.05).double().mean() > 0.8
    assert "inputs" in calibrated.notes[2]
