"""Networks of one's own: arrays and weights from files, images, and what a saved model keeps."""

from __future__ import annotations

import io
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file, save_model
from torch import nn

from dapcal import metrics
from dapcal.data import Labelled, split
from dapcal.explain import explain
from dapcal.gaussians import FullGaussian, KroneckerGaussian
from dapcal.likelihoods import Bernoulli, Gaussian
from dapcal.models import arrays, image_folders, load, network, writing
from dapcal.models import factories as named_networks
from dapcal.models.network import NetworkModel
from dapcal.models.network_fitting import fit
from dapcal.models.subject import Picture
from dapcal.png import image_png
from dapcal.posteriors import plain
from dapcal.report import write

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.types.DapcalWarning")  # few held-out inputs are wrong


def labelled(n: int, seed: int, columns: int = 2) -> Labelled:
    """Two overlapping clusters."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    return Labelled(torch.randn(n, columns, generator=generator) + 1.5 * y[:, None], y)


def classifier(columns: int = 2, outputs: int = 2, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(columns, width), nn.Tanh(), nn.Linear(width, outputs))


@pytest.fixture
def own() -> NetworkModel:
    return fit([classifier()], labelled(120, 0), labelled(90, 1), classes=["no", "yes"], factory="nets:make")


# Arrays


@pytest.mark.parametrize(
    "x",
    [
        np.arange(60, dtype=np.float32).reshape(10, 2, 3),
        np.asfortranarray(np.arange(60, dtype=np.float64).reshape(10, 2, 3)),
        np.arange(60, dtype=">f4").reshape(10, 6),
        np.arange(60, dtype=np.float16).reshape(10, 6),
        np.arange(20, dtype=np.int32).reshape(10, 2),
    ],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_come_whole_or_in_batches(tmp_path, x, save):
    save(tmp_path / "a.npz", x=x, y=np.arange(10, dtype=np.uint8))
    found = arrays.array(tmp_path / "a.npz", "x")
    assert found.shape == x.shape
    np.testing.assert_array_equal(found.read(), x)
    pieces = list(found.batches(4))
    assert [len(piece) for piece in pieces] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate(pieces), x)
    data = arrays.labelled(tmp_path / "a.npz", torch.float64)
    assert data.x.dtype == (torch.float64 if x.dtype.kind == "f" else torch.int64)
    assert data.y.tolist() == list(range(10))
    np.testing.assert_array_equal(data.x.numpy(), x)


def test_batches_hold_little_memory(tmp_path):
    x = np.zeros((4000, 1000), np.float32)  # 16 MB
    np.savez(tmp_path / "a.npz", x=x)
    del x
    tracemalloc.start()
    try:
        rows = sum(len(batch) for batch in arrays.array(tmp_path / "a.npz", "x").batches(100))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows == 4000
    assert peak < 4e6


@pytest.mark.filterwarnings("ignore:Reading .*additional header parsing")
def test_no_changed_byte_gives_other_numbers_or_another_error(tmp_path):
    path = tmp_path / "a.npz"
    x, y = np.random.default_rng(0).random((5, 3)), np.arange(5)
    np.savez(path, x=x, y=y)
    data, read = path.read_bytes(), 0
    for place in range(0, len(data), 3):
        changed = bytearray(data)
        changed[place] ^= 255
        path.write_bytes(changed)
        try:
            found = arrays.labelled(path, torch.float64)
        except ValueError as error:
            assert "a.npz" in str(error)  # noqa: PT017
            continue
        read += 1  # dates and the like
        assert torch.equal(found.x, torch.from_numpy(x))
        assert torch.equal(found.y, torch.from_numpy(y))
    assert 0 < read < len(data) / 10


def test_values_beyond_the_networks_precision_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.full((2, 2), 1e300))
    with pytest.raises(ValueError, match="NaN or inf"):
        arrays.unlabelled(tmp_path / "a.npz", torch.float32)


# Networks by name


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight


def test_tied_weights_may_be_stored_once(tmp_path):
    model = Tied()
    save_model(model, str(tmp_path / "w.safetensors"))
    loaded = named_networks.with_weights(Tied(), tmp_path / "w.safetensors")
    x = torch.randn(4, 3)
    assert torch.equal(loaded.two(loaded.one(x)), model.two(model.one(x)))


def test_a_buffer_may_hold_infinity(tmp_path):
    model = classifier()
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    assert torch.equal(named_networks.with_weights(model, tmp_path / "w.safetensors").mask, model.mask)


def test_weights_leave_the_network_as_it_was(tmp_path):
    model, other = classifier(), classifier()
    save_file(other.state_dict(), tmp_path / "w.safetensors")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loaded = named_networks.with_weights(model, tmp_path / "w.safetensors")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_a_checkpoint_holds_its_weights_under_state_dict(tmp_path):
    model = classifier()
    torch.save({"epoch": 3, "state_dict": model.state_dict()}, tmp_path / "w.pt")
    loaded = named_networks.with_weights(classifier(), tmp_path / "w.pt")
    assert torch.equal(loaded[0].weight, model[0].weight)


def test_a_factory_draws_the_same_constants_and_leaves_the_generator(tmp_path, monkeypatch):
    (tmp_path / "own_drawn.py").write_text("from torch import nn\nmake = lambda: nn.Linear(2, 1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    state = torch.get_rng_state()
    one, two = named_networks.network("own_drawn:make"), named_networks.network("own_drawn:make")
    del sys.modules["own_drawn"]
    assert torch.equal(one.weight, two.weight)
    assert torch.equal(state, torch.get_rng_state())


def test_a_file_in_the_current_folder_takes_the_place_of_no_module(tmp_path, monkeypatch):
    """Before: the current folder came first, and so did a file there that is named like an installed module."""
    (tmp_path / "colorsys.py").write_text("from torch import nn\nmake = lambda: nn.Linear(2, 1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(ValueError, match="There is no make in colorsys"):
        named_networks.network("colorsys:make")
    assert sys.path[-1] == str(tmp_path)


# Images


def test_a_file_is_read_as_what_images_are_and_not_as_what_it_claims_to_be(tmp_path):
    """Before: pillow tried all formats that it knows, those with known holes too."""
    Image.new("L", (4, 4)).save(tmp_path / "a.png", format="PPM")
    with pytest.raises(ValueError, match="no image"):
        image_folders.Decoder((1, 4, 4))(tmp_path / "a.png")


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_shows_what_went_in(channels):
    image = torch.rand(channels, 5, 7, generator=torch.Generator().manual_seed(0))
    with Image.open(io.BytesIO(image_png(2 * image - 1, -1, 1))) as shown:
        assert shown.size == (7, 5)
        pixels = torch.from_numpy(np.array(shown)).reshape(5, 7, channels).permute(2, 0, 1)
    assert torch.equal(pixels, (255 * image.double()).round().to(torch.uint8))


def test_decoding_is_what_pillow_gives_over_255(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    decode = image_folders.Decoder((3, 5, 7), mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.4))
    expected = (pixels / 255 - [0.5, 0.4, 0.3]) / [0.1, 0.2, 0.4]
    np.testing.assert_allclose(decode(tmp_path / "a.png").permute(1, 2, 0), expected, rtol=1e-5, atol=1e-6)


def test_sixteen_bits_a_pixel_and_hidden_files_are_no_images(tmp_path):
    Image.fromarray(np.full((4, 4), 60000, np.uint16)).save(tmp_path / "deep.png")
    (tmp_path / "._deep.png").write_bytes(b"")
    assert image_folders.image_files(tmp_path) == [tmp_path / "deep.png"]
    with pytest.raises(ValueError, match="more than 8 bits"):
        image_folders.Decoder((1, 4, 4))(tmp_path / "deep.png")


def test_a_missing_pillow_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"dapcal\[images\]"):
        image_folders.Decoder((1, 4, 4))(tmp_path / "a.png")


# Models


def test_a_file_gives_back_the_same_predictions_and_data(own, tmp_path):
    own.save(tmp_path / "m.dap")
    again = load(tmp_path / "m.dap", classifier())
    x = labelled(20, 2).x
    assert torch.equal(again.calibrated(x).probs, own.calibrated(x).probs)
    assert np.array_equal(again.columns(x.double())["probability"], own.calibrated(x).columns()["probability"])
    assert again.classes == ("no", "yes")
    assert (again.factory, again.task, again.input_shape) == ("nets:make", "classification", (2,))
    assert again.quality == own.quality
    assert again.train is not None
    assert torch.equal(again.train.x, labelled(120, 0).x)
    assert torch.equal(again.held_out.y, labelled(90, 1).y)


def test_quality_is_that_of_the_half_that_had_no_say(own):
    held_out = labelled(90, 1)
    unseen = held_out.subset(split(90, torch.Generator().manual_seed(0))[1])
    prediction = own.calibrated(unseen.x)
    assert own.quality["inputs"] == 45
    assert own.quality["accuracy"] == pytest.approx(metrics.accuracy(prediction.probs, unseen.y))
    assert own.quality["nll_after"] == pytest.approx(-float(prediction.log_prob(unseen.y).mean()), rel=1e-5)
    assert own.quality["nll_before"] == pytest.approx(-float(prediction.base.log_prob(unseen.y).mean()), rel=1e-5)


def test_progress_is_told_of_all_that_takes_long():
    seen: list[tuple[str, int, int]] = []
    model = classifier().train()
    fit([model], labelled(600, 0), labelled(90, 1), progress=lambda *news: seen.append(news))
    assert model.training
    assert [stage for stage, done, total in seen if done == total] == ["curvature", "calibrating", "measuring"]
    assert ("curvature", 2, 3) in seen


def test_large_data_are_not_kept_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "KEPT_HELD_OUT", 30)
    monkeypatch.setattr(network, "KEPT_BYTES", 1000)
    own = fit([classifier()], labelled(120, 0), labelled(90, 1))
    assert own.train is None
    assert len(own.held_out.x) == 30
    rows = [int((labelled(90, 1).x == x).all(1).nonzero()) for x in own.held_out.x]
    assert rows == sorted(rows)
    own.save(tmp_path / "m.dap")
    again = load(tmp_path / "m.dap", classifier())
    assert again.train is None
    with pytest.raises(ValueError, match="give them again"):
        again.subject("m.dap")
    assert len(again.subject("m.dap", train=labelled(120, 0)).train.x) == 120
    monkeypatch.setattr(network, "KEPT_BYTES", 320)
    assert len(fit([classifier()], labelled(120, 0), labelled(90, 1)).held_out.x) == 20


def test_one_logit_is_of_two_classes():
    own = fit([classifier(outputs=1)], labelled(120, 0), labelled(90, 1))
    assert isinstance(own.calibrated.posterior.likelihood, Bernoulli)
    assert own.classes == ("0", "1")
    assert own.columns(labelled(5, 2).x)["probability"].shape == (5, 2)


def test_a_wide_last_layer_has_kronecker_factors(monkeypatch):
    monkeypatch.setattr(plain, "FULL", 40)
    assert isinstance(_gaussian(classifier(width=19)), FullGaussian)
    assert isinstance(_gaussian(classifier(width=20)), KroneckerGaussian)


def _gaussian(model: nn.Module):
    return fit([model], labelled(60, 0), labelled(60, 1)).calibrated.posterior.gaussian


def test_a_network_without_last_layer_is_taken_whole():
    model = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 4, 2), nn.Tanh(), nn.Conv1d(4, 2, 3), nn.Flatten())
    train, held_out = labelled(80, 0, 4), labelled(60, 1, 4)
    assert isinstance(fit([model], train, held_out).calibrated.posterior.gaussian, KroneckerGaussian)
    assert fit([model], train, held_out, posterior="laplace").classes == ("0", "1")


def test_several_targets_and_whole_numbers_as_targets(tmp_path):
    def data(seed: int) -> Labelled:
        x = labelled(90, seed).x
        return Labelled(x, torch.stack([x.sum(1), x[:, 0].round()], 1).double())

    own = fit([classifier()], data(0), data(1))
    assert own.task == "regression"
    with writing.writer(tmp_path / "s.csv", ()) as write_rows:
        assert write_rows({}, own.columns(data(2).x)) == 90
    header = (tmp_path / "s.csv").read_text().splitlines()[0]
    assert header == (
        "prediction_0,prediction_1,lower_0,lower_1,upper_0,upper_1,epistemic_0,epistemic_1,aleatoric_0,aleatoric_1,"
        "distance,ood_score,ood_p_value,ood,reason"
    )
    counts = fit([classifier(outputs=1)], labelled(90, 0), labelled(90, 1), task="regression")
    assert isinstance(counts.calibrated.posterior.likelihood, Gaussian)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(20, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.embedding(x).mean(1)))


def test_token_ids_stay_whole_numbers(tmp_path):
    def data(seed: int) -> Labelled:
        ids = torch.randint(0, 20, (90, 5), generator=torch.Generator().manual_seed(seed))
        return Labelled(ids, (ids.sum(1) > 48).long())

    own = fit([Tokens()], data(0), data(1))
    np.savez(tmp_path / "new.npz", x=data(2).x.numpy().astype(np.int32))
    inputs = own.inputs(tmp_path / "new.npz", 7)
    assert torch.equal(inputs, data(2).x[:7])
    assert own.columns(inputs)["probability"].shape == (7, 2)
    assert own.show(inputs)[0]["x4"] == str(int(inputs[0, 4]))


# What a person sees


def test_a_report_and_an_explanation_of_flat_inputs(own, tmp_path):
    subject = own.subject("m.dap", new=labelled(30, 2).x + 5, new_name="far.npz")
    assert subject.features == ("x0", "x1")
    assert subject.axes is not None
    assert subject.show(torch.tensor([[1.23456, 2.0]])) == [{"x0": "1.235", "x1": "2"}]
    assert subject.show(torch.tensor([[171234.56, -2e4]])) == [{"x0": "171235", "x1": "-20000"}]
    write(subject, tmp_path / "report.html")
    assert "far.npz" in (tmp_path / "report.html").read_text()
    found = explain(subject.calibrated, subject.train.x, labelled(1, 3).x + 9, subject.features)
    assert found.p_value < 0.1


def test_images_are_shown_as_pictures(tmp_path):
    def data(seed: int) -> Labelled:
        x = torch.randn(60, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
        return Labelled(x, (x.mean((1, 2, 3)) > 0).long())

    own = fit([nn.Sequential(nn.Flatten(), classifier(36))], data(0), data(1))
    low, high = own.shades
    assert (low, high) == (float(data(1).x.min()), float(data(1).x.max()))
    (shown,) = own.show(data(2).x[:1])
    assert isinstance(shown, Picture)
    with Image.open(io.BytesIO(shown.png)) as image:
        assert image.size == (6, 6)
    write(own.subject("m.dap"), tmp_path / "report.html")
    Image.fromarray(np.zeros((6, 6), np.uint8)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="give an npz file"):
        own.inputs(tmp_path, 5)
    pixels = NetworkModel(own.calibrated, Labelled(data(1).x.sigmoid(), data(1).y), classes=own.classes)
    assert torch.equal(pixels.inputs(tmp_path, 5), torch.zeros(1, 1, 6, 6))
