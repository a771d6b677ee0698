"""torch-uncertainty's wrappers as stacked predictions, Lightning modules as plain networks."""

from __future__ import annotations

import copy
import importlib.util
import logging
from pathlib import Path

import lightning
import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dapcal
from dapcal.adapters.laplace_torch import from_laplace
from dapcal.adapters.modules import from_lightning, from_module
from dapcal.likelihoods import Categorical
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors import variational


def method(name):
    """One file of torch-uncertainty: the package as a whole imports torchvision."""
    root = Path(importlib.util.find_spec("torch_uncertainty").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location(f"torch_uncertainty_{name}", root / "methods" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def network():
    return nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))


@pytest.fixture
def data():
    x = torch.randn(200, 2)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


@pytest.mark.parametrize("on_batch", [True, False])
@pytest.mark.parametrize("batch_size", [1, 16])
def test_monte_carlo_dropout(data, on_batch, batch_size):
    x, core = data[0][:20], network()
    wrapped = method("mc_dropout").mc_dropout(core, num_estimators=5, on_batch=on_batch)
    posterior = from_module(wrapped, Categorical(), batch_size=batch_size)
    before = torch.get_rng_state()
    outputs = posterior.outputs(x)
    assert outputs.shape == (5, 20, 3)
    assert outputs.std(0).min() > 0
    assert torch.equal(outputs, posterior.outputs(x))
    assert torch.equal(before, torch.get_rng_state())
    wrapped.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        first = wrapped(x[:batch_size])
    torch.testing.assert_close(outputs[:, :batch_size], first.reshape(5, -1, 3))
    assert not torch.equal(outputs, from_module(wrapped, Categorical(), seed=1, batch_size=batch_size).outputs(x))


def test_monte_carlo_dropout_input_by_input_does_not_depend_on_the_batch(data):
    x = data[0][:12]
    wrapped = method("mc_dropout").mc_dropout(network(), num_estimators=4)
    outputs = from_module(wrapped, Categorical(), batch_size=1).outputs
    torch.testing.assert_close(outputs(x)[:, 3:5], outputs(x[3:5]))
    whole = from_module(wrapped, Categorical()).outputs
    assert not torch.allclose(whole(x)[:, 3:5], whole(x[3:5]))


def test_without_a_seed_it_is_refused(data):
    wrapped = method("mc_dropout").mc_dropout(network(), num_estimators=4)
    with pytest.raises(ValueError, match=r"draws anew each time; give a `seed`"):
        from_module(wrapped, Categorical(), seed=None).outputs(data[0])


def test_deep_ensembles(data):
    members = [network().eval() for _ in range(4)]
    wrapped = method("deep_ensembles").deep_ensembles(members)
    posterior = from_module(wrapped, Categorical(), seed=None)
    torch.testing.assert_close(posterior.outputs(data[0]), torch.stack([member(data[0]) for member in members]))


def test_collected_checkpoints(data):
    wrapped = method("checkpoint_collector").CheckpointCollector(network())
    for epoch in range(3):
        with torch.no_grad():
            wrapped.core_model[0].weight += 0.1
        wrapped.update_wrapper(epoch)
    assert isinstance(wrapped.num_estimators, torch.Tensor)
    posterior = from_module(wrapped, Categorical())
    members = [*wrapped.saved_models, wrapped.core_model]
    expected = torch.stack([member.eval()(data[0]) for member in members])
    torch.testing.assert_close(posterior.outputs(data[0]), expected)


def test_an_ensemble_calibrates_and_is_saved(data, tmp_path):
    x, y = data
    members = []
    for _ in range(4):
        member = network()
        members.append(
            map_posterior.fit(member, Categorical(), (x[:120], y[:120]), epochs=40, learning_rate=0.02).network
        )
    wrapped = method("deep_ensembles").deep_ensembles(members)
    posterior = from_module(wrapped, Categorical())
    calibrated = dapcal.calibrate(posterior, train=(x[:120], y[:120]), held_out=(x[120:], y[120:]), ood=9 * x)
    near, far = calibrated(torch.tensor([[1.5, 1.5], [60.0, 60.0]])).entropy
    assert far > near
    calibrated.save(tmp_path / "ensemble.dap")
    again = dapcal.load(tmp_path / "ensemble.dap", posterior.function)
    torch.testing.assert_close(again(x).probs, calibrated(x).probs)


class Classifier(lightning.LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Dropout(0.1), nn.Tanh(), nn.Linear(width, 3))
        self.loss = nn.CrossEntropyLoss(weight=torch.ones(3))

    def forward(self, x):
        outputs = self.net(x)
        self.log("mean", outputs.mean())
        return outputs

    def training_step(self, batch, _):
        return self.loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


@pytest.fixture
def trained(data):
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    module = Classifier()
    trainer = lightning.Trainer(max_epochs=20, accelerator="cpu", **quiet)
    trainer.fit(module, DataLoader(TensorDataset(data[0][:120], data[1][:120]), batch_size=40))
    return module


@pytest.mark.filterwarnings("error:You are trying to `self.log")
def test_a_trained_lightning_module(trained, data, tmp_path):
    """Its forward logs, which Lightning refuses outside the trainer's loops."""
    x, y = data
    with pytest.raises(Exception, match=r"You are trying to `self\.log"):
        trained(x)
    plain = from_lightning(trained)
    assert trained.trainer is not None
    assert plain._trainer is None
    assert list(plain.state_dict()) == list(trained.state_dict())
    copy.deepcopy(plain)
    point = map_posterior.point(plain, Categorical())
    torch.testing.assert_close(point.outputs(x)[0], trained.eval().net(x))
    train, held_out = (x[:120], y[:120]), (x[120:], y[120:])
    map_posterior.fit(plain, Categorical(), train, epochs=1)
    posterior = variational.fit(plain, Categorical(), train, epochs=2)
    calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out, ood=9 * x)
    calibrated.save(tmp_path / "lightning.dap")
    again = dapcal.load(tmp_path / "lightning.dap", from_lightning(Classifier()))
    torch.testing.assert_close(again(x).probs, calibrated(x).probs)
    la = Laplace(plain, "classification", subset_of_weights="all", hessian_structure="kron")
    la.fit(DataLoader(TensorDataset(*train), batch_size=40))
    assert from_laplace(la, draws=3).outputs(x).shape == (3, 200, 3)


def test_lightning_modules_that_are_refused():
    class Steps(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, _):
            return self.net(batch[0]).sum()

    with pytest.raises(TypeError, match=r"Steps to define `forward`.*one of \['net'\]"):
        from_lightning(Steps())
    with pytest.raises(TypeError, match=r"a LightningModule, got Sequential without \['log', "):
        from_lightning(network())
