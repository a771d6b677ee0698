"""Networks evaluated with parameters from outside, against a plain loop over draws."""

from __future__ import annotations

import copy
import warnings
from threading import Event, Thread

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import dapcal
from dapcal import networks
from dapcal.likelihoods import Categorical
from dapcal.networks import Layout, evaluate, frozen_copy, layout_of, split_state, unfused
from dapcal.posteriors import ensemble, samples, variational


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Tied(nn.Module):
    """Encoder and decoder share a weight; a frozen parameter and a buffer take part."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight
        self.gain = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.register_buffer("offset", torch.tensor([1.0, -1.0, 0.5, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.decoder(torch.tanh(self.encoder(x))) + self.offset


class Branching(nn.Module):
    """Control flow that depends on activations: cannot be vectorised over draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return 2 * h if h[0, 0] > 0 else h


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    model(3 * torch.randn(200, 5) + 1)  # running statistics unlike the initial ones
    return model


def cnn() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    body(torch.randn(50, 2, 8, 8))
    return nn.Sequential(*body, nn.Linear(36, 3))


def chain() -> nn.Module:
    body = nn.Sequential(nn.Linear(12, 6, bias=False), nn.GELU(), nn.Linear(6, 6), nn.Dropout(0.5))
    return nn.Sequential(nn.Flatten(), body, nn.LeakyReLU(0.3), nn.Linear(6, 2)).eval()


def frozen_chain() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    model[4].weight.requires_grad_(False)
    return model


def per_place() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1), nn.Flatten())


CASES = {
    "chain": (chain, (3, 4)),
    "frozen chain": (frozen_chain, (5,)),
    "per place": (per_place, (6, 3)),
    "mlp": (mlp, (5,)),
    "batch norm": (batch_norm, (5,)),
    "cnn": (cnn, (2, 8, 8)),
    "lstm": (Recurrent, (7, 3)),
    "tied, frozen, buffer": (Tied, (4,)),
    "branching": (Branching, (5,)),
}


def setting(case: str, draws: int = 4, inputs: int = 11):
    make, shape = CASES[case]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
        own, shared = split_state(model)
        stacked = {n: p + 0.3 * torch.randn(draws, *p.shape) for n, p in own.items()}
        return model, stacked, shared, torch.randn(inputs, *shape)


@pytest.mark.parametrize("case", CASES)
def test_equals_a_plain_loop(case):
    model, draws, shared, x = setting(case)
    with torch.no_grad():
        expected = [functional_call(model, {**shared, **{n: d[s] for n, d in draws.items()}}, (x,)) for s in range(4)]
    found = evaluate(model, draws, shared, x)
    assert not found.requires_grad
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert (found[0] - found[1]).abs().max() > 1e-3


@pytest.mark.parametrize("case", [c for c in CASES if c != "branching"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_batches_change_nothing(case, batch_size):
    model, draws, shared, x = setting(case)
    expected = evaluate(model, draws, shared, x)
    torch.testing.assert_close(evaluate(model, draws, shared, x, batch_size), expected, rtol=1e-5, atol=1e-5)


def test_memory_changes_nothing(monkeypatch):
    model, draws, shared, x = setting("mlp", draws=7)
    expected = evaluate(model, draws, shared, x)
    monkeypatch.setattr(networks.evaluation, "MEMORY", 1)  # one draw at a time
    torch.testing.assert_close(evaluate(model, draws, shared, x), expected)


def test_the_model_is_left_alone():
    model, draws, shared, x = setting("batch norm")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    evaluate(model, draws, shared, x)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_buffers_may_differ_between_draws():
    model, draws, shared, x = setting("batch norm", draws=2)
    means = torch.stack([torch.zeros(6), torch.full((6,), 3.0)])
    found = evaluate(model, {**draws, "1.running_mean": means}, shared, x)
    for s in range(2):
        own = {n: d[s] for n, d in draws.items()} | {"1.running_mean": means[s]}
        torch.testing.assert_close(found[s], functional_call(model, {**shared, **own}, (x,)).detach())


def test_one_output_without_a_dimension_of_its_own():
    model = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    own, shared = split_state(model)
    x = torch.randn(6, 2)
    found = evaluate(model, {n: p[None] for n, p in own.items()}, shared, x)
    assert found.shape == (1, 6, 1)
    torch.testing.assert_close(found[0, :, 0], model(x).detach())


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (
            nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2))),
            ValueError,
            r"\(3, C\) for 3 inputs, got \(3, 2, 2\)",
        ),
        (nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)), ValueError, r"for 3 inputs, got \(12,\)|got \(12, 1\)"),
        (nn.LSTM(4, 2), TypeError, "return a tensor .*, got tuple"),
    ],
)
def test_wrong_outputs_are_refused(model, error, message):
    own, shared = split_state(model)
    with pytest.raises(error, match=message):
        evaluate(model, {n: p[None] for n, p in own.items()}, shared, torch.ones(3, 4))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_outputs_that_are_not_finite_are_refused(value):
    model, draws, shared, x = setting("mlp")
    draws["3.bias"][2, 1] = value
    with pytest.raises(ValueError, match="returned NaN or inf; check its weights"):
        evaluate(model, draws, shared, x)


def test_layout_round_trip():
    parameters = {"b": torch.randn(2, 3), "a": torch.randn(4), "scalar": torch.tensor(2.0)}
    layout = layout_of(parameters)
    assert layout == Layout(("b", "a", "scalar"), ((2, 3), (4,), ()))
    assert layout.sizes == {"b": 6, "a": 4, "scalar": 1}
    vector = layout.flatten(parameters)
    assert vector.shape == (11,)
    assert all(torch.equal(t, parameters[n]) for n, t in layout.unflatten(vector).items())
    stacked = {n: torch.stack([p, 2 * p]) for n, p in parameters.items()}
    draws = layout.flatten(stacked, batch=1)
    assert torch.equal(draws, torch.stack([vector, 2 * vector]))
    assert all(torch.equal(t, stacked[n]) for n, t in layout.unflatten(draws).items())


def test_state_is_split_into_what_is_learnt_and_the_rest():
    model = Tied()
    learnt, rest = split_state(model)
    assert set(learnt) == {"encoder.weight", "decoder.bias"}
    assert set(rest) == {"gain", "offset"}
    with torch.no_grad():
        model.encoder.weight.zero_()
    assert learnt["encoder.weight"].abs().sum() > 0
    with pytest.raises(ValueError, match="got none; unfreeze some"):
        split_state(model.requires_grad_(False))


def test_a_frozen_copy_is_out_of_reach_of_training():
    model = mlp().train()
    copy = frozen_copy(model)
    assert model.training
    assert not copy.training
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p.requires_grad for p in copy.parameters())
    before = copy[0].weight.clone()
    with torch.no_grad():
        model[0].weight.add_(1)
    assert torch.equal(copy[0].weight, before)


def test_threads_inside_together_run_unfused_and_leave_the_setting_as_it_was():
    first_left, second_in = Event(), Event()
    seen = []

    def second() -> None:
        with unfused():
            second_in.set()
            first_left.wait(20)
            seen.append(torch.backends.mha.get_fastpath_enabled())

    before = torch.backends.mha.get_fastpath_enabled()
    thread = Thread(target=second)
    with unfused():
        thread.start()
        assert second_in.wait(20)
    first_left.set()
    thread.join()
    assert seen == [False]
    assert torch.backends.mha.get_fastpath_enabled() == before


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_network_has_its_plain_names(tmp_path):
    """torch.compile wraps a module, and puts words before the names of its parameters; nothing is compiled here."""
    network = nn.Sequential(nn.Linear(2, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 3)))
    outer = torch.compile(copy.deepcopy(network))
    inner = copy.deepcopy(network)
    inner[1] = torch.compile(inner[1])
    assert "_orig_mod" in next(iter(outer.state_dict()))
    for compiled in (outer, inner):
        assert list(networks.plain(compiled).state_dict()) == list(network.state_dict())
        assert networks.split_state(compiled)[0].keys() == networks.split_state(network)[0].keys()
    x, y = torch.randn(60, 2), torch.arange(60) % 3
    posterior = samples.from_state_dicts(outer, Categorical(), [outer.state_dict(), inner.state_dict()])
    other = ensemble.of([outer, inner], Categorical())
    assert torch.equal(posterior.outputs(x), other.outputs(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dapcal.DapcalWarning)
        fitted = variational.fit(outer, Categorical(), (x, y), epochs=1, draws=3)
        calibrated = dapcal.calibrate(fitted, train=(x, y), held_out=(2 * torch.randn(60, 2), y))
    calibrated.save(tmp_path / "m.dap")
    for again in (dapcal.load(tmp_path / "m.dap", outer), dapcal.load(tmp_path / "m.dap", network, device="cpu")):
        assert torch.equal(again(x).probs, calibrated(x).probs)


def test_an_activation_that_comes_twice_runs_twice():
    torch.manual_seed(0)
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 8), relu, nn.Sequential(nn.Linear(8, 8), relu), nn.Linear(8, 2)).eval()
    draws = {name: torch.stack([p, 2 * p]).detach() for name, p in model.named_parameters()}
    x = torch.randn(5, 4)
    found = evaluate(model, draws, {}, x)
    for own, outputs in enumerate(found):
        torch.testing.assert_close(outputs, functional_call(model, {n: d[own] for n, d in draws.items()}, (x,)))


def test_a_layer_that_comes_twice_is_no_plain_chain():
    tied = nn.Linear(4, 4)
    assert networks.dense_chain(nn.Sequential(tied, nn.ReLU(), tied), torch.zeros(1, 4)) is None
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    assert networks.dense_chain(nn.Sequential(first, nn.ReLU(), second), torch.zeros(1, 4)) is None
    assert networks.dense_chain(nn.Sequential(first, nn.ReLU(), nn.Linear(4, 4)), torch.zeros(1, 4)) is not None
