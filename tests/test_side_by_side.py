"""Networks trained side by side learn what they would learn alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dapcal.data import Labelled
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors import ensemble
from dapcal.posteriors._training import batched

OPTIONS = {"epochs": 30, "batch_size": 16, "learning_rate": 0.03, "prior_scale": 2.0}


def sets(kind: str, n: int, seed: int) -> list[Labelled]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, n, 3, generator=generator)
    if kind == "classes":
        return [Labelled(part, (part[:, 0] > 0).long() + (part[:, 1] > 0).long()) for part in x]
    noise = 0.3 * torch.randn(3, n, 1, generator=generator)
    return [Labelled(part, part[:, :1].sin() * part[:, 1:2] + own) for part, own in zip(x, noise, strict=True)]


def make(outputs: int):
    return lambda: nn.Sequential(
        nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, outputs)
    )


@pytest.mark.parametrize(("kind", "likelihood", "outputs"), [("numbers", Gaussian(), 1), ("classes", Categorical(), 3)])
@pytest.mark.parametrize("patience", [2, None])
def test_ensembles_side_by_side_are_those_of_each_data_set_alone(kind, likelihood, outputs, patience):
    train, held_out = sets(kind, 53, 0), sets(kind, 20, 1)
    found = ensemble.fit_each(
        make(outputs), likelihood, train, held_out, members=2, seed=5, patience=patience, **OPTIONS
    )
    stopped = set()
    for place, (own, watched) in enumerate(zip(train, held_out, strict=True)):
        epochs: list[int] = []
        alone = ensemble.fit(
            make(outputs), likelihood, (own.x, own.y), members=2, seed=5 + place, held_out=(watched.x, watched.y),
            patience=patience or OPTIONS["epochs"], progress=lambda epoch, told=epochs: told.append(epoch.number),
            **OPTIONS,
        )  # fmt: skip
        torch.testing.assert_close(found[place].draws, alone.draws, atol=2e-4, rtol=1e-3)
        assert found[place].likelihood == alone.likelihood or found[place].likelihood.noise == pytest.approx(
            alone.likelihood.noise, rel=1e-4
        )
        stopped.add(len(epochs) < 2 * OPTIONS["epochs"])
    assert (True in stopped) == (patience is not None), "patience ends early somewhere, so that it is tested"


def test_large_networks_are_trained_in_groups_and_learn_the_same(monkeypatch):
    train, held_out = sets("numbers", 53, 0), sets("numbers", 20, 1)
    weights = [torch.rand(53, generator=torch.Generator().manual_seed(place)) for place in range(3)]
    groups, told = [], list[tuple[int, int]]()
    whole = batched.train

    def trained(runs, *given, **options):
        groups.append(len(runs))
        return whole(runs, *given, **options)

    monkeypatch.setattr(batched, "train", trained)

    def fit():
        own = lambda done, total: told.append((done, total))  # noqa: E731
        return ensemble.fit_each(
            make(1), Gaussian(), train, held_out, members=2, row_weights=weights, progress=own, **OPTIONS
        )

    expected = fit()
    told.clear()
    monkeypatch.setattr(ensemble, "TOGETHER", 5 * 87)  # two ensembles of two networks have 4 × 87
    for one, two in zip(expected, fit(), strict=True):
        torch.testing.assert_close(two.draws, one.draws, atol=1e-4, rtol=1e-4)
    assert groups == [6, 4, 2]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (30, 30)


def test_dropout_is_on_while_training_and_off_while_watching():
    train, held_out = sets("numbers", 40, 0), sets("numbers", 20, 1)

    def network(rate: float):
        return lambda: nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(rate), nn.Linear(16, 1))

    one, again, none = (
        ensemble.fit_each(network(rate), Gaussian(), train, held_out, members=2, **OPTIONS)[0].draws
        for rate in (0.4, 0.4, 0.0)
    )
    assert torch.equal(one, again)
    assert not torch.allclose(one, none, atol=1e-2)


def test_what_cannot_be_trained_side_by_side_is_refused():
    train, held_out = sets("numbers", 40, 0), sets("numbers", 20, 1)
    with pytest.raises(ValueError, match=r"`data` as sets of one size, got \[39, 40\] rows"):
        ensemble.fit_each(make(1), Gaussian(), [train[0], train[1].subset(torch.arange(39))], held_out[:2])
    norm = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))  # noqa: E731
    with pytest.raises(ValueError, match="Expected a chain of linear layers"):
        ensemble.fit_each(norm, Gaussian(), train, held_out)
