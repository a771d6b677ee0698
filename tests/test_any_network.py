"""Networks as people have them: heads at every token, adapters, wrappers, frozen and odd weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dapcal
from dapcal.distances import Space
from dapcal.likelihoods import Categorical
from dapcal.networks import feature_layer, head_of, plain, with_head_last
from dapcal.networks.heads import head_at_places
from dapcal.posteriors import ensemble, laplace
from dapcal.posteriors.linear import LastLayer

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")  # so few held-out inputs

PAD, CLASSES = 0, 3


class Decoder(nn.Module):
    """As classifiers that read from left to right do it: a head at every token, the answer at the last one."""

    def __init__(self, pooling: str = "last") -> None:
        super().__init__()
        self.words, self.body, self.score = nn.Embedding(31, 5), nn.GRU(5, 6, batch_first=True), nn.Linear(6, CLASSES)
        self.pooling = pooling

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        logits = self.score(self.body(self.words(input_ids))[0])  # (N, length, C)
        if self.pooling == "mean":
            return {"logits": logits.mean(1)}
        if self.pooling == "max":
            return {"logits": logits.amax(1)}
        last = (input_ids != PAD).sum(1) - 1
        return {"logits": logits[torch.arange(len(logits)), last]}


def texts(n: int, seed: int, length: int = 7) -> tuple[Tensor, Tensor]:
    generator, y = torch.Generator().manual_seed(seed), torch.arange(n) % CLASSES
    x = 1 + 10 * y[:, None] + torch.randint(10, (n, length), generator=generator)
    ends = torch.randint(3, length + 1, (n, 1), generator=generator)
    return x * (torch.arange(length) < ends), y


def rows(n: int, seed: int) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % CLASSES
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed)) + y[:, None], y


def seeded(make, *args) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(*args)


def mlp(last=lambda layer: layer) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), last(nn.Linear(8, CLASSES)))


def calibrate(network: nn.Module, data=rows, **options):
    options = {"train": data(30, 0), "held_out": data(24, 1), "candidates": 8, **options}
    return dapcal.calibrate(network, Categorical(), **options)


# A head at every token.


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_head_at_every_token_is_applied_once(pooling, tmp_path):
    network, x = seeded(Decoder, pooling), texts(9, 2)[0]
    changed = with_head_last(network, head_at_places(network, x[:2]))
    assert head_of(changed) == "score"
    assert head_of(network) is None
    assert list(changed.state_dict()) == list(network.state_dict())
    torch.testing.assert_close(changed(x)["logits"], network(x)["logits"])
    calibrated = calibrate(network, texts, distance=Space(radius=None))
    assert calibrated.head == "score"
    assert isinstance(calibrated.posterior.linear, LastLayer)
    assert calibrated.distance.spaces[0].projector(x).shape == (9, 6)
    torch.testing.assert_close(calibrated.posterior.moments(x).mean, network(x)["logits"])
    calibrated.save(tmp_path / "decoder.dap")
    assert torch.equal(dapcal.load(tmp_path / "decoder.dap", Decoder(pooling))(x).probs, calibrated(x).probs)
    torch.testing.assert_close(calibrated.module()(x).mean, calibrated(x).mean)


def test_a_head_that_does_not_commute_stays_where_it_is():
    network, x = seeded(Decoder, "max"), texts(9, 2)[0]
    assert head_at_places(network, x[:2]) is None
    assert head_at_places(seeded(mlp), rows(4, 0)[0]) is None


# Which layer.


class Adapted(nn.Module):
    """A linear layer with a low-rank path beside it, as LoRA has it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down, self.up = nn.Linear(base_layer.in_features, 2, False), nn.Linear(2, base_layer.out_features, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


PARAMETRIZED = nn.utils.parametrizations
LAYERS = {
    "adapter": (lambda: mlp(Adapted), "2.base_layer"),
    "weight norm": (lambda: mlp(PARAMETRIZED.weight_norm), "2"),
    "spectral norm": (lambda: mlp(PARAMETRIZED.spectral_norm), "2"),
    "frozen": (lambda: mlp().requires_grad_(False), "2"),
    "DataParallel": (lambda: nn.DataParallel(mlp()), "2"),
    "DataParallel twice": (lambda: nn.DataParallel(nn.DataParallel(mlp())), "2"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_features_and_predictions_of(name, tmp_path):
    make, layer = LAYERS[name]
    network, x = seeded(make), rows(5, 2)[0]
    assert feature_layer(plain(network), x) == (layer, False)
    calibrated = calibrate(network)
    with torch.no_grad():
        expected = plain(network).eval()(x)
    found = calibrated.posterior.moments(x).mean
    torch.testing.assert_close(found, expected)
    calibrated.save(tmp_path / "n.dap")
    torch.testing.assert_close(dapcal.load(tmp_path / "n.dap", make())(x).probs, calibrated(x).probs)


# What cannot work.


def hooked() -> nn.Module:
    network = mlp()
    network[0].made = network[0].weight * 2  # as the old weight norm does: a tensor that was computed
    return network


REFUSED = [
    (lambda: calibrate(hooked()), "cannot be copied .* make it copyable"),
    (lambda: calibrate(mlp().to("meta")), "on one device, got meta; load it without"),
    (lambda: calibrate(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))), r"could not run on inputs \(1, 4\) of"),
    (lambda: calibrate(mlp(), data=lambda n, seed: (rows(n, seed)[0].double(), rows(n, seed)[1])), "float64 .*type"),
    (lambda: calibrate(nn.Sequential(nn.Flatten(), nn.ReLU())), "no other weights to learn; calibrate it before"),
    (lambda: laplace.fit(mlp().requires_grad_(False), Categorical(), rows(9, 0)), "unfreeze some"),
    (lambda: dapcal.calibrate(ensemble.of([mlp(), mlp()], Categorical()), train=texts(9, 0), held_out=texts(9, 0)),
     r"could not run on inputs \(1, 7\) of torch.int64"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[row[1][:20] for row in REFUSED])
def test_what_cannot_work_is_said_in_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()
