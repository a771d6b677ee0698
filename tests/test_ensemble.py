"""Deep ensembles: members against networks trained alone, resuming, networks that are brought."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dapcal
from cases import Killed
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors import ensemble
from dapcal.posteriors import map as map_posterior
from dapcal.progress import Epoch


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))


def made(seed: int, build=make) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


OPTIONS = {"epochs": 6, "learning_rate": 0.02, "batch_size": 32}


def same(one, two) -> bool:
    pairs = zip([one.draws, *one.buffers.values()], [two.draws, *two.buffers.values()], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# Training


def test_members_are_networks_trained_alone(blobs):
    posterior = ensemble.fit(make, Categorical(), blobs[0], members=3, prior_scale=2.0, seed=7, **OPTIONS)
    x = blobs[1][0]
    outputs = posterior.outputs(x)
    assert outputs.shape == (3, 120, 3)
    for number in range(3):
        alone = map_posterior.fit(
            made(21 + number), Categorical(), blobs[0], prior_scale=2.0, seed=21 + number, **OPTIONS
        )
        torch.testing.assert_close(outputs[number], alone.network(x).detach())
        assert torch.equal(posterior.draws[number], alone.center)
        assert torch.equal(posterior.buffers["1.running_var"][number], alone.network[1].running_var)
    assert posterior.prior is None
    assert posterior.gaussian is None
    assert torch.equal(posterior.network[1].running_mean, posterior.buffers["1.running_mean"][0])
    assert posterior.with_prior(2.0).squared_norms.shape == (3, 1)


def test_members_differ_and_reproduce(blobs):
    state = torch.random.get_rng_state()
    one, two, three = (ensemble.fit(make, Categorical(), blobs[0], members=3, seed=s, **OPTIONS) for s in (0, 0, 10))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert same(one, two)
    assert not same(one, three)
    assert torch.cdist(one.draws, one.draws)[~torch.eye(3, dtype=bool)].min() > 0.5


def test_it_classifies_and_calibrates(blobs, tmp_path):
    (x, y), (x_new, y_new) = blobs
    posterior = ensemble.fit(make, Categorical(), (x, y), members=4, **{**OPTIONS, "epochs": 20})
    probabilities = posterior.outputs(x_new).softmax(-1).mean(0)
    assert (probabilities.argmax(-1) == y_new).double().mean() > 0.95
    calibrated = dapcal.calibrate(posterior, train=(x, y), held_out=(x_new, y_new), ood=3 * x_new)
    far = torch.tensor([[6.0, -6.0]])
    assert calibrated(far).probs.max() < posterior.outputs(far).softmax(-1).mean(0).max()
    calibrated.save(tmp_path / "model.dap")
    assert torch.equal(dapcal.load(tmp_path / "model.dap", make())(x_new).probs, calibrated(x_new).probs)


@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_every_kind_of_data(blobs, kind):
    data = TensorDataset(*blobs[0])
    train = data if kind == "dataset" else DataLoader(data, batch_size=32, shuffle=True)
    posterior = ensemble.fit(make, Categorical(), train, members=2, **{**OPTIONS, "epochs": 20})
    x, y = blobs[1]
    assert (posterior.outputs(x).mean(0).argmax(-1) == y).double().mean() > 0.95


@pytest.mark.parametrize("loader", [False, True])
def test_an_interrupted_ensemble_goes_on(tmp_path, blobs, loader):
    """Killed in the third member; the first two are read, not trained again."""
    passes: list[int] = []

    class Counted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            passes[-1] += 1
            return super().forward(x)

    def counted() -> nn.Module:
        passes.append(0)
        return Counted(*make())

    def fit(**more):
        passes.clear()
        generator = torch.Generator().manual_seed(3)
        data = TensorDataset(*blobs[0])
        train = DataLoader(data, batch_size=32, shuffle=True, generator=generator) if loader else data
        return ensemble.fit(counted, Categorical(), train, members=4, **OPTIONS, **more)

    seen: list[Epoch] = []

    def stop(epoch: Epoch) -> None:
        seen.append(epoch)
        if len(seen) == 2 * 6 + 4:
            raise Killed

    check = 0 if loader else 1  # one input, to check all targets at once
    reference = fit()
    assert passes == [30 + check] * 4
    with pytest.raises(Killed):
        fit(folder=tmp_path / "runs", checkpoint_seconds=0, progress=stop)
    resumed = fit(folder=tmp_path / "runs")
    assert passes == [check, check, 10 + check, 30 + check]
    assert same(resumed, reference)
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == [f"member-{m}" for m in range(4)]
    assert same(fit(folder=tmp_path / "runs"), reference)
    assert passes == [check] * 4


def test_progress_names_the_member(blobs, capsys):
    ensemble.fit(make, Categorical(), blobs[0], members=2, progress=True, **OPTIONS)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 2)[:2] for line in lines] == [["member", "1/2"]] * 6 + [["member", "2/2"]] * 6


# Noise


def test_noise_levels_are_pooled(generator):
    x = torch.randn(80, 2, generator=generator)
    y = x[:, 0] + 0.5 * torch.randn(80, generator=generator)
    options = {"epochs": 20, "learning_rate": 0.03}
    posterior = ensemble.fit(lambda: nn.Linear(2, 1), Gaussian(2.0), (x, y), members=3, **options)
    noises = [
        map_posterior.fit(made(m, lambda: nn.Linear(2, 1)), Gaussian(2.0), (x, y), seed=m, **options).likelihood.noise
        for m in range(3)
    ]
    assert len(set(noises)) == 3
    assert posterior.likelihood.noise == pytest.approx(math.sqrt(sum(n**2 for n in noises) / 3), rel=1e-5)


def test_other_learnt_values_are_averaged():
    @dataclass(frozen=True)
    class Shifted(Categorical):
        shift: float = 0.0

        def free(self) -> dict[str, Tensor]:
            return {"shift": torch.tensor(self.shift)}

        def at(self, free: dict[str, Tensor]) -> Shifted:
            return replace(self, shift=float(free["shift"]))

    assert ensemble.pooled([Shifted(1.0, 1.0), Shifted(1.0, 3.0)]).shift == 2.0
    assert ensemble.pooled([Categorical(), Categorical()]) == Categorical()


# Networks that are brought


def test_trained_networks(blobs):
    x = blobs[1][0]
    models = [made(seed) for seed in range(3)]
    for model in models:
        model(3 * x)  # batch-norm statistics
    posterior = ensemble.of(models, Categorical())
    expected = torch.stack([model.eval()(x) for model in models]).detach()
    torch.testing.assert_close(posterior.outputs(x), expected)
    torch.testing.assert_close(posterior.network(x), expected[0])
    with torch.no_grad():
        models[0][0].weight.zero_()
    torch.testing.assert_close(posterior.outputs(x), expected)
    assert posterior.prior is None


# Refusals


@pytest.mark.parametrize(
    ("first", "more", "error", "message"),
    [
        (make(), {}, TypeError, "function that returns a new network, got Sequential; pass e.g. lambda"),
        ([make(), make()], {}, TypeError, r"got list; .*ensemble\.of"),
        (lambda: 3, {}, TypeError, "`make` to return a network, got int"),
        (make, {"members": 0}, ValueError, "`members` >= 1, got 0"),
        (make, {"checkpoint": "run"}, ValueError, "give their `folder`"),
        (make, {"lerning_rate": 1.0}, TypeError, "lerning_rate"),
    ],
)
def test_fit_refuses(blobs, first, more, error, message):
    with pytest.raises(error, match=message):
        ensemble.fit(first, Categorical(), blobs[0], **more)


@pytest.mark.parametrize(
    ("models", "error", "message"),
    [
        ([], TypeError, "list of trained networks"),
        (make(), TypeError, "list of trained networks, got Sequential"),
        ([make(), make().state_dict()], TypeError, "OrderedDict"),
        ([nn.Linear(2, 3), nn.Linear(2, 4)], ValueError, "one architecture, but .*bias.* differ .* number 1"),
        ([nn.Linear(2, 3), make()], ValueError, "one architecture"),
    ],
)
def test_of_refuses(models, error, message):
    with pytest.raises(error, match=message):
        ensemble.of(models, Categorical())


def test_one_folder_for_one_ensemble(tmp_path, blobs):
    ensemble.fit(make, Categorical(), blobs[0], members=1, folder=tmp_path, **OPTIONS)
    with pytest.raises(ValueError, match=r"member-0 is the checkpoint of another run \(other seed\)"):
        ensemble.fit(make, Categorical(), blobs[0], members=1, seed=5, folder=tmp_path, **OPTIONS)
