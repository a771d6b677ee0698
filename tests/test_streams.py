"""Training data that are read batch by batch: one pass, nothing gathered in memory, the numbers of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dapcal
from dapcal import mapped
from dapcal.calibration.gap import GapCrossValidation
from dapcal.data import gather
from dapcal.distances import Space
from dapcal.distances.metrics import NearestNeighbor
from dapcal.distances.projectors import Features, Identity, RandomFourier
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.mapped import is_mapped
from dapcal.posteriors import ensemble, laplace, sgmcmc, swag, variational, vogn
from dapcal.posteriors import map as map_posterior

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")  # few held-out inputs are wrong
N = 240


class Counted(Dataset):
    """Items that are read one by one, and counted."""

    def __init__(self, *tensors):
        self.tensors, self.reads = tensors, 0

    def __len__(self):
        return len(self.tensors[-1])

    def __getitem__(self, row):
        self.reads += 1
        x, y = (tensor[row] for tensor in self.tensors)
        return x, y


def rows(kind: str):
    generator = torch.Generator().manual_seed(3)
    shape = (1, 6, 6) if kind == "images" else (4,)
    x = torch.randn(N + 120, *shape, generator=generator)
    score = x.flatten(1)[:, :3].sum(1)
    y = score[:, None] + 0.3 * torch.randn(len(x), 1, generator=generator) if kind == "numbers" else (score > 0).long()
    x = x + (y[:, None, None, None] if kind == "images" else 0)
    return (x[:N], y[:N]), (x[N:], y[N:])


def network(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    body = (
        [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8)]
        if kind == "images"
        else [nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 8)]
    )
    model = nn.Sequential(*body, nn.Tanh(), nn.Linear(8, 1 if kind == "numbers" else 2))
    (x, y), _ = rows(kind)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(40):
        optimizer.zero_grad()
        out = model(x)
        (nn.functional.mse_loss(out, y) if kind == "numbers" else nn.functional.cross_entropy(out, y)).backward()
        optimizer.step()
    return model.eval()


def subject(kind: str, members: int):
    networks = [network(kind, seed) for seed in range(members)]
    likelihood = Gaussian(0.3) if kind == "numbers" else Categorical()
    return networks[0] if members == 1 else ensemble.of(networks, likelihood)


def numbers(calibrated, x):
    prediction = calibrated(x)
    return [
        torch.tensor(calibrated.phi),
        calibrated.distance.raw(x),
        prediction.pre_distance,
        prediction.ood_score,
        prediction.ood_p_value,
        prediction.log_prob(rows_targets(calibrated, x)),
    ]


def rows_targets(calibrated, x):
    return (
        torch.zeros(len(x), 1) if isinstance(calibrated.posterior.likelihood, Gaussian) else torch.zeros(len(x)).long()
    )


@pytest.fixture
def on_disk(monkeypatch):
    """Nothing is small enough for memory."""
    monkeypatch.setattr(mapped, "IN_MEMORY", 0)
    monkeypatch.setattr(mapped, "BLOCK", 50)


@pytest.mark.parametrize("kind", ["images", "classes", "numbers"])
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("source", ["dataset", "loader"])
def test_numbers_are_those_of_tensors(kind, members, source, request):
    train, held_out = rows(kind)
    posterior = subject(kind, members)
    x = torch.cat([held_out[0][:20], 5 * held_out[0][:20]])
    expected = dapcal.calibrate(posterior, train=train, held_out=held_out)
    request.getfixturevalue("on_disk")
    data = Counted(*train)
    found = dapcal.calibrate(
        posterior, train=data if source == "dataset" else DataLoader(data, batch_size=64), held_out=held_out
    )
    assert data.reads <= N + 1, "one pass, and one item to see what it is"
    assert found.notes == expected.notes
    assert [space.name for space in found.distance.spaces] == [space.name for space in expected.distance.spaces]
    assert found.distance.spaces
    indices = [s.metric.index for s in found.distance.spaces if isinstance(s.metric, NearestNeighbor)]
    assert all(is_mapped(index.points) for index in indices)
    for one, other in zip(numbers(found, x), numbers(expected, x), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "space",
    [Space(Identity()), Space(Features(layer="4")), Space(RandomFourier(16)), Space(lambda x: x.flatten(1)[:, :3])],
    ids=["inputs", "a layer", "fourier", "a function"],
)
def test_spaces_that_are_asked_for(space, on_disk):
    train, held_out = rows("images")
    posterior = laplace.last_layer(network("images"), Categorical(), train)
    found = dapcal.calibrate(posterior, train=TensorDataset(*train), held_out=held_out, distance=space)
    expected = dapcal.calibrate(posterior, train=train, held_out=held_out, distance=space)
    assert torch.allclose(found.distance(held_out[0]), expected.distance(held_out[0]))
    assert is_mapped(found.distance.spaces[0].metric.index.points)
    assert found.phi == pytest.approx(expected.phi)


def test_a_loader_that_shuffles_and_augments_is_read_once(on_disk):
    """Features and inputs are those of one and the same pass, however it came out."""
    train, held_out = rows("classes")

    class Noisy(Counted):
        def __getitem__(self, row):
            x, y = super().__getitem__(row)
            return x + 0.1 * torch.randn(4), y

    data = Noisy(*train)
    spaces = [Space(Identity(), name="inputs"), Space(Features(), name="features")]
    posterior = subject("classes", 3)
    loader = DataLoader(data, batch_size=50, shuffle=True)
    found = dapcal.calibrate(posterior, train=loader, held_out=held_out, distance=spaces)
    assert data.reads <= N + 1
    inputs, features = (space.metric.index.points for space in found.distance.spaces)
    assert torch.allclose(found.distance.spaces[1].projector(inputs.clone()), features, atol=1e-6)


def test_gap_cross_validation_reads_rows_from_the_file(on_disk):
    train, held_out = rows("classes")
    posterior = subject("classes", 2)
    sizes = []

    def refit(x, y):
        sizes.append((len(x), len(y)))
        return posterior

    found, expected = (
        dapcal.calibrate(posterior, train=data, held_out=held_out, loss=GapCrossValidation(refit, regions=2))
        for data in (TensorDataset(*train), train)
    )
    assert found.phi == expected.phi
    assert sizes == 4 * [(144, 144)]


def test_texts_of_several_lengths(on_disk):
    class Texts(Dataset):
        def __init__(self, start, stop):
            self.start, self.stop = start, stop

        def __len__(self):
            return self.stop - self.start

        def __getitem__(self, row):
            if not 0 <= row < len(self):
                raise IndexError(row)
            row += self.start
            length = 3 + row % 4
            ids = torch.randint(1, 9, (length,), generator=torch.Generator().manual_seed(row))
            return {"ids": ids, "mask": torch.ones(length), "labels": torch.tensor(row % 2)}

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.last = nn.Embedding(10, 6, padding_idx=0), nn.Linear(6, 2)

        def forward(self, ids, mask):
            return self.last(torch.tanh((self.words(ids) * mask[..., None]).sum(1)))

    model = Bag().eval()
    found = dapcal.calibrate(model, Categorical(), train=Texts(0, 120), held_out=Texts(120, 200), distance=Space())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "IN_MEMORY", 10**9)
        expected = dapcal.calibrate(
            model, Categorical(), train=Texts(0, 120), held_out=Texts(120, 200), distance=Space()
        )
    assert is_mapped(found.distance.spaces[0].metric.index.points)
    assert not is_mapped(expected.distance.spaces[0].metric.index.points)
    assert found.phi == pytest.approx(expected.phi)


def test_what_is_gathered_is_checked_as_it_comes(on_disk):
    x, y = torch.zeros(200, 3), torch.zeros(200).long()
    assert is_mapped(gather(TensorDataset(x, y), "train").x)
    x[150] = torch.nan
    with pytest.raises(ValueError, match="finite inputs in `train`, got NaN or inf in 1 of"):
        gather(TensorDataset(x, y), "train")


@pytest.mark.parametrize(
    "fit",
    [
        lambda train: laplace.last_layer(network("classes"), Categorical(), train),
        lambda train: map_posterior.fit(network("classes"), Categorical(), train, epochs=2),
        lambda train: variational.fit(network("classes"), Categorical(), train, epochs=2, draws=3),
        lambda train: swag.fit(network("classes"), Categorical(), train, epochs=4, draws=3),
        lambda train: vogn.fit(network("classes"), Categorical(), train, epochs=2, draws=3),
        lambda train: ensemble.fit(lambda: network("classes"), Categorical(), train, members=2, epochs=2),
        lambda train: sgmcmc.sgld(network("classes"), Categorical(), train, cycles=1, epochs=2, draws=2),
    ],
    ids=["laplace", "map", "variational", "swag", "vogn", "ensemble", "sgld"],
)
def test_posteriors_of_a_data_set_are_those_of_its_tensors(fit, on_disk):
    train, _ = rows("classes")
    data = Counted(*train)
    found, expected = fit(data), fit(train)
    assert data.reads <= N + 1
    assert torch.equal(found.draws, expected.draws)


def test_what_was_calibrated_on_a_stream_is_saved_and_moved(on_disk, tmp_path):
    train, held_out = rows("images")
    posterior = subject("images", 2)
    calibrated = dapcal.calibrate(posterior, train=TensorDataset(*train), held_out=held_out, distance=Space(Identity()))
    calibrated.save(tmp_path / "model.dap")
    again = dapcal.load(tmp_path / "model.dap", network("images"))
    x = held_out[0][:10]
    assert torch.equal(again(x).pre_distance, calibrated(x).pre_distance)
    assert torch.equal(calibrated.to("cpu")(x).pre_distance, calibrated(x).pre_distance)
