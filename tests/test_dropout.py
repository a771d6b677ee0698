"""Monte Carlo dropout: against torch's own dropout and closed forms; draws as functions; what is refused."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dapcal
from dapcal.adjust import Reweight, SelfNormalised
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors import dropout
from dapcal.posteriors import map as map_posterior
from dapcal.types import DapcalWarning

CHANNELS = {
    "Dropout1d": (nn.Dropout1d, (3, 7)),
    "Dropout2d": (nn.Dropout2d, (3, 4, 5)),
    "Dropout2d on lines": (nn.Dropout2d, (3, 7)),
    "Dropout3d": (nn.Dropout3d, (3, 2, 2, 3)),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout, (3, 4, 5)),
}


def mlp(rate: float = 0.3) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2, 16), nn.ReLU(), nn.Dropout(rate), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
    )


class Twice(nn.Module):
    """One dropout module that runs twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.drop(x), self.drop(x)], 1)


class Encoder(nn.Module):
    """A transformer over a sequence of five, with an optional mask of padding."""

    def __init__(self, pad: bool = False, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=batch_first)
        layer.self_attn.dropout = 0.0
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=pad)
        self.head = nn.Linear(8, 3)
        self.pad, self.batch_first = pad, batch_first

    def forward(self, x: Tensor) -> Tensor:
        padding = (torch.arange(5) >= 3).expand(len(x), 5) if self.pad else None
        if self.batch_first:
            return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])
        return self.head(self.encoder(x.transpose(0, 1))[0])


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], layers: int) -> None:
        super().__init__()
        self.core, self.drop, self.head = kind(2, 4, layers, batch_first=True), nn.Dropout(0.5), nn.Linear(4, 3)
        self.core.dropout = 0.4

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.core(x)[0][:, -1]))


def masks_of(layer: nn.Module, shape: tuple[int, ...], draws: int, seed: int = 0) -> Tensor:
    """What a layer does to ones, for every draw: (S, *shape)."""
    posterior = dropout.wrap(nn.Sequential(layer, nn.Flatten()), Gaussian(), draws=draws, seed=seed)
    return posterior.outputs(torch.ones(2, *shape))[:, 0].reshape(draws, *shape)


def assert_equal_moments(one: Tensor, two: Tensor) -> None:
    """Means and variances of independent rows agree within four standard errors of their difference."""
    centre = two.mean(0)
    for power in (1, 2):
        a, b = (one - centre) ** power, (two - centre) ** power
        error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() <= 4 * error + 1e-6).all()


# against torch and closed forms


def test_moments_are_those_of_torchs_dropout():
    model = mlp()
    x = 2 * torch.randn(3, 2)
    ours = dropout.wrap(model, Categorical(), draws=1500).outputs(x)  # (S, 3, 3)
    with torch.no_grad():
        torchs = torch.stack([model.train()(row.expand(20_000, 2)) for row in x], 1)
    assert ours.std(0).min() > 0.01
    assert_equal_moments(ours.flatten(1), torchs.flatten(1))


def test_a_linear_model_with_masks_by_hand():
    model = nn.Sequential(nn.Linear(2, 6), nn.Dropout(0.4), nn.Linear(6, 3))
    mask = masks_of(nn.Dropout(0.4), (6,), draws=20)
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.6).item()}
    x = torch.randn(5, 2)
    by_hand = torch.stack([model[2](model[0](x) * z) for z in mask])
    torch.testing.assert_close(dropout.wrap(model, Categorical(), draws=20).outputs(x), by_hand.detach())


def test_inputs_share_their_masks():
    """Cov[f(x), f(x')] = p/(1 − p) Σ_j w_j² h_j(x) h_j(x'), for one dropout layer and a linear head."""
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Dropout(0.4), nn.Linear(12, 1))
    x = torch.randn(4, 2)
    outputs = dropout.wrap(model, Gaussian(), draws=4000).outputs(x)[..., 0].detach()
    hidden = model[1](model[0](x)).detach() * model[3].weight.detach()
    exact = 0.4 / 0.6 * hidden @ hidden.T
    scale = (exact.diagonal()[:, None] * exact.diagonal()).sqrt()
    assert ((torch.cov(outputs.T) - exact).abs() < 4 * scale * math.sqrt(2 / 4000)).all()
    error = (exact.diagonal() / 4000).sqrt()
    assert ((outputs.mean(0) - model.eval()(x)[:, 0].detach()).abs() < 4 * error).all()


@pytest.mark.filterwarnings("ignore:dropout2d. Received a 3D input")
@pytest.mark.parametrize("name", CHANNELS)
def test_channels_are_dropped_whole(name):
    kind, shape = CHANNELS[name]
    masks = masks_of(kind(0.4), shape, draws=1500).flatten(2)  # (S, C, ...)
    assert (masks == masks[..., :1]).all()
    assert len(masks.unique()) == 2
    with torch.no_grad():
        torchs = kind(0.4)(torch.ones(20_000, *shape)).flatten(2)
    torch.testing.assert_close(masks.unique(), torchs.unique())
    assert_equal_moments(masks[..., 0], torchs[..., 0])
    together = (masks[:, 0, 0] == masks[:, 1, 0]).float().mean().item()  # channels are independent
    assert together == pytest.approx(0.6**2 + 0.4**2, abs=4 * 0.5 / 1500**0.5)


def test_alpha_dropout_keeps_mean_and_variance():
    posterior = dropout.wrap(nn.Sequential(nn.AlphaDropout(0.3)), Gaussian(), draws=40)
    x = torch.randn(500, 30)
    outputs = posterior.outputs(x)
    assert outputs.mean().item() == pytest.approx(0.0, abs=0.06)
    assert outputs.var().item() == pytest.approx(1.0, abs=0.06)
    with torch.no_grad():
        torchs = nn.AlphaDropout(0.3)(torch.full((20_000, 1), 0.7))
    ours = posterior.outputs(torch.full((1, 30), 0.7))
    torch.testing.assert_close(ours.unique(), torchs.unique())
    assert_equal_moments(ours.reshape(-1, 1), torchs)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.AlphaDropout])
def test_a_rate_of_one_drops_all(kind):
    with torch.no_grad():
        expected = kind(1.0)(torch.ones(2, 3))
    assert torch.equal(masks_of(kind(1.0), (3,), draws=2), expected)


# a draw is a function


@pytest.mark.parametrize(
    "make", [mlp, lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.3))]
)
def test_batches_and_their_order_do_not_matter(make, monkeypatch):
    model = make()
    model(3 * torch.randn(50, 2) + 1)  # batch norm has statistics
    posterior = dropout.wrap(model, Categorical(), draws=7)
    x = torch.randn(30, 2)
    outputs = posterior.outputs(x)
    order = torch.randperm(30)
    close = {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(posterior.outputs(x[order]), outputs[:, order], **close)
    torch.testing.assert_close(torch.cat([posterior.outputs(part) for part in x.split(11)], 1), outputs, **close)
    monkeypatch.setattr(dropout, "BATCH", 8)
    torch.testing.assert_close(posterior.outputs(x), outputs, **close)


def test_each_call_of_a_module_has_a_mask_of_its_own():
    outputs = dropout.wrap(Twice(), Gaussian(), draws=200).outputs(torch.ones(600, 10))  # two batches
    first, second = outputs[:, 0, :10], outputs[:, 0, 10:]
    assert (first == second).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert (outputs == outputs[:, :1]).all()


def test_layers_and_draws_have_masks_of_their_own():
    model = nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Dropout(0.5))
    both = dropout.wrap(model, Gaussian(), draws=200).outputs(torch.ones(1, 20))[:, 0] > 0
    assert both.float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert len(both.unique(dim=0)) > 190


def test_seeds():
    x = torch.randn(6, 2)
    model = mlp()
    one, two, three, more = (
        dropout.wrap(model, Categorical(), draws=s, seed=seed).outputs(x)
        for s, seed in ((5, 0), (5, 0), (5, 1), (8, 0))
    )
    assert torch.equal(one, two)
    assert torch.equal(one, more[:5])
    assert not (one[:, None] == three).all(-1).all(-1).any()


# what stays untouched


def test_the_model_and_global_state_stay():
    model = mlp().train()
    model[0].weight.requires_grad_(False)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    rng = torch.random.get_rng_state()
    posterior = dropout.wrap(model, Categorical(), draws=3)
    x = torch.ones(4, 2)
    outputs = posterior.outputs(x)
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert torch.backends.mha.get_fastpath_enabled()
    assert model.training
    assert model[2].training
    assert model[3].weight.requires_grad
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    with torch.no_grad():
        model[3].weight.zero_()
        model[2].p = 0.9
    assert torch.equal(posterior.outputs(x), outputs)
    assert not outputs.requires_grad


def test_hooks_are_removed_even_after_an_error():
    posterior = dropout.wrap(mlp(), Categorical(), draws=3)
    plain = posterior.model(torch.ones(4, 2))
    with pytest.raises(RuntimeError):
        posterior.outputs(torch.ones(4, 3))
    posterior.outputs(torch.ones(4, 2))
    assert not any(module._forward_hooks for module in posterior.model.modules())
    assert torch.equal(posterior.model(torch.ones(4, 2)), plain)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_network_has_the_weights_and_no_dropout():
    model = nn.Sequential(nn.BatchNorm1d(2), mlp())
    model(5 * torch.randn(50, 2))
    posterior = dropout.wrap(model, Categorical())
    x = torch.randn(5, 2)
    expected = model.eval()(x).detach()
    with torch.no_grad():
        for tensor in posterior.model.state_dict().values():
            tensor.zero_()  # only `state` counts
    torch.testing.assert_close(posterior.network(x), expected)
    torch.testing.assert_close(posterior.outputs(x).mean(0), expected, atol=1.0, rtol=0)
    assert posterior.outputs(x).std() > 0
    assert not posterior.network.training


def test_tied_weights_and_dtype():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3)).double()
    model[2].weight = model[0].weight
    posterior = dropout.wrap(model, Gaussian(), draws=4)
    x = torch.randn(5, 3, dtype=torch.float64)
    mask = masks_of(nn.Dropout(0.5), (3,), draws=4).double()
    torch.testing.assert_close(posterior.outputs(x), torch.stack([model[2](model[0](x) * z) for z in mask]).detach())


def test_a_model_with_a_single_output_dimension():
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1), nn.Flatten(0))
    assert dropout.wrap(model, Gaussian(), draws=3).outputs(torch.ones(5, 2)).shape == (3, 5, 1)


# layers that hide their dropout


@pytest.mark.parametrize("pad", [False, True])
def test_a_transformer_encoder_drops(pad):
    model = Encoder(pad)
    posterior = dropout.wrap(model, Categorical(), draws=300)
    assert list(posterior.rates) == [
        f"encoder.layers.{i}.{name}" for i in (0, 1) for name in ("dropout", "dropout1", "dropout2")
    ]
    x = torch.randn(2, 5, 8)
    ours = posterior.outputs(x)
    with torch.no_grad():
        torchs = torch.stack([model.train()(row.expand(3000, 5, 8)) for row in x], 1)
    assert_equal_moments(ours.flatten(1), torchs.flatten(1))
    assert ours.std(0).min() > 0.05


def test_dropout_inside_attention_stays_off_and_is_told():
    model = Encoder()
    quiet = dropout.wrap(model, Categorical(), draws=3).outputs(torch.ones(4, 5, 8))
    model.encoder.layers[1].self_attn.dropout = 0.3
    with pytest.warns(DapcalWarning, match=r"stays off: \['encoder.layers.1.self_attn'\]"):
        posterior = dropout.wrap(model, Categorical(), draws=3)
    assert torch.equal(posterior.outputs(torch.ones(4, 5, 8)), quiet)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_inside_a_recurrence_stays_off_and_is_told(kind):
    with pytest.warns(DapcalWarning, match=r"stays off: \['core'\]. Only dropout modules are drawn"):
        dropout.wrap(Recurrent(kind, 2), Categorical())
    assert dropout.wrap(Recurrent(kind, 1), Categorical(), draws=3).outputs(torch.ones(4, 6, 2)).shape == (3, 4, 3)


# what is refused


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 3), "dropout modules of p > 0, got none; train it with nn.Dropout modules"),
        (nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.0)), "got none"),
        (nn.LSTM(2, 3, 2, dropout=0.5), r"got none \(dropout inside \['LSTM'\] cannot be drawn\)"),
    ],
)
def test_models_without_dropout_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        dropout.wrap(model, Categorical())


@pytest.mark.parametrize("options", [{"draws": 0}, {"seed": -1}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="Expected `draws` >= 1 and `seed` >= 0"):
        dropout.wrap(mlp(), Categorical(), **options)


@pytest.mark.parametrize(
    ("model", "x", "error", "message"),
    [
        (
            Encoder(batch_first=False),
            (4, 5, 8),
            ValueError,
            r"4 inputs, batch first, at .* \(5, 4, 8\); use batch_first",
        ),
        (nn.Sequential(nn.Dropout1d(0.5)), (4, 5), ValueError, r"dropout layer `0` \(Dropout1d"),  # torch: one input
        (nn.Sequential(nn.Dropout3d(0.5)), (4, 5, 2, 2), ValueError, r"dropout layer `0` \(Dropout3d"),
        (nn.Sequential(nn.Dropout(0.5)), (4, 5, 2), ValueError, r"return \(4, C\) for 4 inputs, got \(4, 5, 2\)"),
        (nn.Sequential(nn.Dropout(0.5), nn.LSTM(5, 2)), (4, 5), TypeError, "return a tensor .* got tuple"),
    ],
)
def test_activations_and_outputs_are_checked(model, x, error, message):
    with pytest.raises(error, match=message):
        dropout.wrap(model, Gaussian(), draws=2).outputs(torch.ones(*x))


def test_infinite_outputs_are_refused():
    with pytest.raises(ValueError, match="returned NaN or inf"):
        dropout.wrap(mlp(), Categorical(), draws=2).outputs(torch.full((4, 2), math.inf))


def test_another_model_is_refused():
    posterior = dropout.wrap(mlp(), Categorical())
    with pytest.raises(ValueError, match=r"dropout layers \['2', '5'\], got one without \['5'\]"):
        dataclasses.replace(posterior, model=mlp()[:5])
    with pytest.raises(TypeError, match=r"`model` as an nn.Module, got function"):
        dataclasses.replace(posterior, model=lambda x: x)


# end to end


def test_it_calibrates(blobs):
    train, held_out = blobs
    network = map_posterior.fit(mlp(), Categorical(), train, epochs=40, learning_rate=0.01).network
    posterior = dropout.wrap(network, Categorical(), draws=20)
    calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out, ood=6 * held_out[0])
    x = torch.tensor([[2.0, 0.0], [60.0, 10.0]])
    near, far = calibrated(x).probs.amax(1)
    assert near > 0.9
    assert far < posterior.outputs(x).softmax(-1).mean(0).amax(1)[1] - 0.1
    assert (calibrated(held_out[0]).probs.argmax(1) == held_out[1]).float().mean() > 0.95
    heated = dapcal.calibrate(posterior, train=train, held_out=held_out, ood=6 * held_out[0], temperature=True)
    assert heated.posterior.likelihood.temperature != 1
    assert torch.equal(replace(heated.posterior, share=1.0).outputs(x), posterior.outputs(x))


@pytest.mark.parametrize("adjust", [Reweight(), Reweight(SelfNormalised())])
def test_reweight_says_what_is_missing(blobs, adjust):
    train, held_out = blobs
    posterior = dropout.wrap(mlp(), Categorical(), draws=5)
    assert posterior.gaussian is posterior.prior is posterior.squared_norms is None
    with pytest.raises(ValueError, match="needs parameter draws and the prior scale"):
        dapcal.calibrate(posterior, train=train, held_out=held_out, ood=6 * held_out[0], adjust=adjust)
