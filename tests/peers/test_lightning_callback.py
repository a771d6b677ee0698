"""The Lightning callback: calibrates when fit ends, with the data that the trainer has, in one process of several."""

from __future__ import annotations

import logging

import lightning
import pytest
import pytorch_lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset

import dapcal
from dapcal.adapters.modules import from_lightning
from dapcal.calibration.inputs import Hardest
from dapcal.integrations.lightning import Calibrate
from dapcal.integrations.loaders import in_order
from dapcal.likelihoods import Categorical

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Steps:
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 2))

    def training_step(self, batch, _):
        x, y = batch[:2]
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _, dataloader_idx=0):  # noqa: ARG002
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)

    def forward(self, x):
        self.log("mean", x.mean())
        return self.net(x)


class Module(Steps, lightning.LightningModule):
    pass


class Older(Steps, pytorch_lightning.LightningModule):
    """Of the package under its earlier name, whose trainer meets the same callback."""


@pytest.fixture(autouse=True)
def silent():
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)


@pytest.fixture
def data():
    x = torch.randn(400, 2)
    y = (x[:, 0] * x[:, 1] + 0.5 * torch.randn(400) > 0).long()
    return TensorDataset(x[:200], y[:200]), TensorDataset(x[200:], y[200:])


def loaders(train, validation):
    return DataLoader(train, batch_size=50, shuffle=True), DataLoader(validation, batch_size=64)


def fit(callback, train, validation, module=None, trainer=lightning.Trainer, **options):
    lightning.seed_everything(0, verbose=False)
    fitted = module or Module()
    options = {"max_epochs": 10, "accelerator": "cpu", **QUIET, **options}
    trainer(callbacks=[callback], **options).fit(fitted, *([train, validation] if validation else [train]))
    return fitted


@pytest.mark.parametrize(("kind", "trainer"), [(Module, lightning.Trainer), (Older, pytorch_lightning.Trainer)])
def test_artefact_and_report_are_written_when_fit_ends(kind, trainer, data, tmp_path):
    callback = Calibrate(tmp_path / "net.dap", Categorical(), classes=["low", "high"])
    module = fit(callback, *loaders(*data), module=kind(), trainer=trainer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.dap", "net.html"]
    assert "low" in (tmp_path / "net.html").read_text()
    again, x = dapcal.load(tmp_path / "net.dap", from_lightning(kind())), data[1].tensors[0]
    torch.testing.assert_close(again(x).probs, callback.model.calibrated(x).probs)
    torch.testing.assert_close(
        callback.model.calibrated.posterior.network(x[:5]), module.eval().net(x[:5]).detach(), rtol=1e-5, atol=1e-6
    )
    assert again(torch.full((1, 2), 30.0)).ood_p_value < 0.05
    read = dapcal.models.load(tmp_path / "net.dap", from_lightning(kind()))  # as the command line reads it
    assert read.classes == ("low", "high")


def test_the_same_as_calibrate_on_the_half_of_the_validation_rows(data, tmp_path):
    callback = Calibrate(tmp_path / "net.dap", Categorical(), report=False, seed=3)
    module = fit(callback, *loaders(*data))
    rows = callback.ending.rows(200)
    assert len(set(rows.tolist())) == 100
    held_out = tuple(part[rows] for part in data[1].tensors)
    expected = dapcal.calibrate(
        from_lightning(module).cpu(), Categorical(), train=data[0].tensors, held_out=held_out, seed=3
    )
    assert callback.model.calibrated.phi == expected.phi
    assert not (tmp_path / "net.html").exists()


def test_data_of_ones_own_and_batches_of_another_form(data, tmp_path):
    train = TensorDataset(*data[0].tensors, torch.arange(200))  # x, y and the number of the row
    callback = Calibrate(
        tmp_path / "net.dap",
        network=lambda module: module.net,
        pair=lambda batch: (batch[0], batch[1]),
        held_out=data[1].tensors,
        report=tmp_path / "page.html",
        options={"temperature": False},
    )
    fit(callback, DataLoader(train, batch_size=50), None)
    assert callback.model is not None
    assert len(callback.model.held_out.x) == 200
    assert torch.equal(callback.model.train.x, train.tensors[0])
    assert (tmp_path / "page.html").exists()


class ByName(lightning.LightningModule):
    """Batches are dicts, whose rows have two inputs and a target."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, one, two):
        return self.head(torch.tanh(self.net(torch.cat([one, two], 1))))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self(batch["one"], batch["two"]), batch["labels"])

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def test_batches_that_are_dicts(data, tmp_path):
    train, validation = (
        [{"one": x[:1], "two": x[1:], "labels": y} for x, y in zip(*part.tensors, strict=True)] for part in data
    )
    callback = Calibrate(tmp_path / "net.dap", options={"distance": dapcal.distances.Space(), "ood": Hardest()})
    fit(callback, *loaders(train, validation), module=ByName(), max_epochs=20)
    x = torch.tensor([[0.3], [50.0]])
    prediction = callback.model.calibrated({"one": x, "two": -x})
    assert prediction.ood_p_value[1] < 0.05 < prediction.ood_p_value[0]
    again = dapcal.load(tmp_path / "net.dap", from_lightning(ByName()))
    torch.testing.assert_close(again({"one": x, "two": -x}).probs, prediction.probs)
    assert "one" in (tmp_path / "net.html").read_text()


def test_what_cannot_work_is_refused_before_training(data, tmp_path):
    train, validation = loaders(*data)
    with pytest.raises(ValueError, match="this trainer does not validate; give `held_out`"):
        fit(Calibrate(tmp_path / "net.dap"), train, None)
    with pytest.raises(FileNotFoundError):
        fit(Calibrate(tmp_path / "nowhere" / "net.dap"), train, validation)
    with pytest.raises(ValueError, match="in two files"):
        fit(Calibrate(tmp_path / "net.dap", report=tmp_path / "net.dap"), train, validation)
    for wrong in (0, 1.5):
        with pytest.raises(ValueError, match="`share` above 0"):
            Calibrate(tmp_path / "net.dap", share=wrong)
    with pytest.raises(ValueError, match="seed as arguments of the callback"):
        Calibrate(tmp_path / "net.dap", options={"seed": 1})
    assert not list(tmp_path.iterdir())


def test_an_error_at_the_end_is_a_warning_and_the_network_is_there(data, tmp_path):
    few = Subset(data[1], [0, 1])
    with pytest.warns(dapcal.DapcalWarning, match=r"Training has ended well.*at least 4 held-out inputs"):
        module = fit(Calibrate(tmp_path / "net.dap"), loaders(*data)[0], DataLoader(few, batch_size=2))
    assert isinstance(module, Module)
    with pytest.warns(dapcal.DapcalWarning, match=r"one validation loader, got 2; say which .* `held_out`"):
        fit(Calibrate(tmp_path / "net.dap"), loaders(*data)[0], [loaders(*data)[1]] * 2, max_epochs=1)
    assert not list(tmp_path.iterdir())


def test_a_trial_run_writes_nothing(data, tmp_path):
    fit(Calibrate(tmp_path / "net.dap"), *loaders(*data), fast_dev_run=True)
    assert not list(tmp_path.iterdir())


def test_with_several_processes_rank_zero_calibrates_on_all_rows(data, tmp_path):
    callback = Calibrate(tmp_path / "net.dap", Categorical(), report=False)
    fit(callback, *loaders(*data), strategy="ddp_fork", devices=2, max_epochs=2)
    read = dapcal.models.load(tmp_path / "net.dap", from_lightning(Module()))
    assert len(read.train.x) == 200
    assert len(read.held_out.x) == 100
    assert [path.name for path in tmp_path.iterdir()] == ["net.dap"]


class Squares(Dataset):
    def __len__(self):
        return 9

    def __getitem__(self, index):
        return torch.tensor([float(index)]), index**2


def test_loaders_are_read_in_order():
    shuffled = DataLoader(Squares(), batch_size=4, shuffle=True, drop_last=True)
    assert [y.tolist() for _, y in in_order(shuffled)] == [[0, 1, 4, 9], [16, 25, 36, 49], [64]]
    some = DataLoader(Squares(), batch_size=2, sampler=SubsetRandomSampler([5, 3, 1]))
    assert [y.tolist() for _, y in in_order(some)] == [[1, 9], [25]]
    sizes = DataLoader(Squares(), batch_sampler=[[8, 7], [1]])
    assert [len(y) for _, y in in_order(sizes)] == [9]
    split = in_order(shuffled, pair=lambda batch: (batch[1], batch[0]))
    assert next(iter(split))[0].tolist() == [0, 1, 4, 9]
