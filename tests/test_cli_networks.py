"""`dapcal calibrate` and `dapcal score`, as an engineer with a trained network runs them."""

from __future__ import annotations

import csv
import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import dapcal
from dapcal.cli.calibrate import _numbers as calibrate_numbers
from dapcal.cli.calibrate import calibrate
from dapcal.cli.score import score
from dapcal.data import split
from dapcal.posteriors import ensemble, laplace

NETS = """
import torch
from torch import nn

def images():
    features = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh())
    return nn.Sequential(features, nn.Linear(8, 3))

def numbers():
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

class Nested:
    line = nn.Linear(2, 1)

def softmax():
    return nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))

def wider():
    return nn.Sequential(nn.Linear(2, 17), nn.Tanh(), nn.Linear(17, 1))

def named():
    return nn.Sequential(nn.Linear(2, 16), nn.Identity(), nn.Tanh(), nn.Linear(16, 1))

def breaks():
    return 1 / 0

def needs(width):
    return nn.Linear(2, width)

def none():
    return 3

def empty():
    return nn.ReLU()

a_list = [1, 2]
"""

FACTORIES: dict = {}
exec(NETS, FACTORIES)

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.types.DapcalWarning")  # few held-out inputs are wrong

app = typer.Typer()
app.command()(calibrate)
app.command()(score)


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def run(*arguments: object) -> Ended:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


def refused(*arguments: object) -> str:
    """The one line that says why, after which nothing is left behind."""
    before = sorted(Path().rglob("*"))
    ended = run(*arguments, "--quiet")
    assert ended.code == 2, ended
    assert ended.out == ""
    assert len(ended.err.splitlines()) == 1, ended.err
    assert [path for path in sorted(Path().rglob("*")) if "__pycache__" not in path.parts] == [
        path for path in before if "__pycache__" not in path.parts
    ]
    return ended.err


def images(n: int, seed: int):
    """A bright blob in one of three corners, on a noisy ground."""
    generator = np.random.default_rng(seed)
    y = np.arange(n) % 3
    x = 0.25 * generator.random((n, 1, 8, 8))
    for row, label in enumerate(y):
        down, right = [(0, 0), (0, 4), (4, 0)][label]
        x[row, 0, down : down + 4, right : right + 4] += 0.5 * generator.random()
    return x.astype(np.float32), y


def numbers(n: int, seed: int):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(n, 2))
    return x.astype(np.float32), np.sin(x[:, 0]) + x[:, 1] + 0.1 * generator.normal(size=n)


def trained(make, x, y, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = make()
    targets = torch.from_numpy(y)
    loss = nn.CrossEntropyLoss() if y.dtype.kind == "i" else lambda out, y: ((out[:, 0] - y) ** 2).mean()
    parameters = list(model.parameters())
    for _ in range(150):
        gradients = torch.autograd.grad(loss(model(torch.from_numpy(x)), targets), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.3 * gradient
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder as an engineer has it: code, weights, arrays."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "own_nets.py").write_text(NETS)
    with torch.random.fork_rng(devices=[]):
        for kind, data in (("images", images), ("numbers", numbers)):
            x, y = data(240, 0)
            np.savez(folder / f"{kind}-train.npz", x=x, y=y)
            for part, seed in (("val", 1), ("new", 2)):
                own_x, own_y = data(120, seed)
                np.savez_compressed(folder / f"{kind}-{part}.npz", x=own_x, y=own_y)
            for seed in range(3):
                model = trained(FACTORIES[kind], x, y, seed)
                save_file(model.state_dict(), folder / f"{kind}-{seed}.safetensors")
            torch.save(model.state_dict(), folder / f"{kind}.pt")
    return folder


@pytest.fixture(autouse=True)
def _here(made, tmp_path, monkeypatch):
    """Every test in a folder of its own, with links to what is there; imports are forgotten."""
    for path in made.iterdir():
        if path.is_file():
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def given(kind: str = "numbers", **changed: object) -> list[object]:
    options: dict[str, object] = {
        "model": f"own_nets:{kind}",
        "weights": f"{kind}-0.safetensors",
        "train": f"{kind}-train.npz",
        "held-out": f"{kind}-val.npz",
        "out": "m.dap",
    } | {name.replace("_", "-"): value for name, value in changed.items()}
    return ["calibrate", *(part for name, value in options.items() for part in (f"--{name}", value))]


@pytest.fixture(scope="module")
def saved(made):
    """Calibrated models, one of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        patch.setattr(sys, "path", [*sys.path])
        for kind in ("images", "numbers"):
            ended = run(*given(kind, out=f"{kind}.dap"), "--json")
            assert ended.code == 0, ended
        sys.modules.pop("own_nets", None)
    return made


def table(path: str = "scores.csv") -> dict[str, np.ndarray]:
    with Path(path).open(newline="") as file:
        rows = list(csv.reader(file))
    return {name: np.array(values) for name, values in zip(rows[0], zip(*rows[1:], strict=True), strict=True)}


def tensors(path: str):
    with np.load(path) as file:
        return torch.from_numpy(file["x"]), torch.from_numpy(file["y"])


def network(kind: str, weights: str) -> nn.Module:
    model = FACTORIES[kind]()
    model.load_state_dict(load_file(weights))
    return model


# What comes out


def chooses(held_out):
    """The half of the held-out data that things are chosen on."""
    x, y = held_out
    rows = split(len(x), torch.Generator().manual_seed(0))[0]
    return x[rows], y[rows]


def test_images_are_scored_as_dapcal_called_directly_scores_them():
    ended = run(*given("images"), "--classes", "left, right,low", "--json")
    assert ended.code == 0, ended
    told = json.loads(ended.out)
    assert told["task"] == "classification"
    assert told["classes"] == ["left", "right", "low"]
    assert told["accuracy"] > 0.9
    assert any("whole numbers" in note for note in told["notes"])
    ended = run(
        "score", "m.dap", "images-new.npz", "--model", "own_nets:images", "-o", "scores.csv", "--batch-size", 50
    )
    assert ended.code == 0, ended
    assert "inputs" in ended.out

    train, held_out = tensors("images-train.npz"), tensors("images-val.npz")
    likelihood = dapcal.likelihoods.Categorical()
    scale = laplace.HeldOut(chooses(held_out))
    posterior = laplace.last_layer(network("images", "images-0.safetensors"), likelihood, train, prior_scale=scale)
    calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out)
    assert told["phi"] == pytest.approx(calibrated.phi)
    prediction = calibrated(tensors("images-new.npz")[0])
    columns = table()
    assert list(columns["index"]) == [str(i) for i in range(120)]
    names = np.array(["left", "right", "low"])
    assert list(columns["prediction"]) == list(names[prediction.probs.argmax(-1).numpy()])
    for place, name in enumerate(names):
        np.testing.assert_allclose(columns[f"probability_{name}"].astype(float), prediction.probs[:, place], atol=1e-5)
    for name in ("epistemic", "aleatoric", "distance", "ood_score", "ood_p_value"):
        np.testing.assert_allclose(columns[name].astype(float), getattr(prediction, name), rtol=1e-3, atol=1e-5)
    assert list(columns["ood"]) == [str(bool(p <= 0.05)).lower() for p in prediction.ood_p_value]


def test_a_regression_learns_its_noise_from_training_residuals_and_refines_it():
    ended = run(*given(), "--json")
    assert ended.code == 0, ended
    told = json.loads(ended.out)
    assert (
        run("score", "m.dap", "numbers-new.npz", "--model", "own_nets:numbers", "-o", "s.csv", "--level", 0.8).code == 0
    )

    model = network("numbers", "numbers-0.safetensors")
    (x, y), held_out = tensors("numbers-train.npz"), tensors("numbers-val.npz")
    train, held_out = (x, y.float()), (held_out[0], held_out[1].float())
    with torch.no_grad():
        noise = float((model(x)[:, 0] - y).square().mean().sqrt())
    calibrated = dapcal.calibrate(model, dapcal.likelihoods.Gaussian(noise), train=train, held_out=held_out)
    x, y = tensors("numbers-new.npz")
    prediction = calibrated(x)
    columns = table("s.csv")
    lower, upper = prediction.interval(0.8)
    for name, value in (("prediction", prediction.mean), ("lower", lower), ("upper", upper)):
        np.testing.assert_allclose(columns[name].astype(float), value[:, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(columns["epistemic"].astype(float), prediction.epistemic[:, 0].sqrt(), rtol=1e-3)
    assert 0.05 < told["rmse"] < 0.5
    assert "probability" not in "".join(columns)


def test_errors_and_distances_are_printed_as_people_write_numbers():
    """An error of 171,234.6 read 1.712e+05, and a radius 1.41e+03."""
    quality = {"rmse": 171234.6, "inputs": 60, "nll_before": 1.0, "nll_after": 1.0}
    calibrated = SimpleNamespace(phi=12345.0, summary=lambda: SimpleNamespace(network=None))
    fitted = SimpleNamespace(quality=quality, classes=(), task="regression", calibrated=calibrated)
    lines = calibrate_numbers(fitted, 240, 1, {"features": 1412.3, "inputs": None}).splitlines()
    for line in ("RMSE      171,235", "phi       12,345", "radius    features 1412, inputs none"):
        assert line in lines


def test_several_weights_are_a_deep_ensemble():
    weights = [part for seed in range(3) for part in ("--weights", f"images-{seed}.safetensors")]
    assert run(*given("images"), *weights[2:]).code == 0
    assert run("score", "m.dap", "images-new.npz", "--model", "own_nets:images", "-o", "s.npz").code == 0
    members = [network("images", f"images-{seed}.safetensors") for seed in range(3)]
    calibrated = dapcal.calibrate(
        ensemble.of(members, dapcal.likelihoods.Categorical()),
        train=tensors("images-train.npz"),
        held_out=tensors("images-val.npz"),
    )
    with np.load("s.npz") as found:
        np.testing.assert_allclose(found["probability"], calibrated(tensors("images-new.npz")[0]).probs, atol=1e-5)
        assert found["classes"].tolist() == ["0", "1", "2"]
        assert found["index"].tolist() == list(range(120))


def test_the_full_laplace_approximation_given_ood_inputs_and_weights_of_torch():
    far = {"x": 6 + np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)}
    np.savez("far.npz", **far)
    options = given(weights="numbers.pt", posterior="laplace", ood="far.npz", task="regression")
    ended = run(*options, "--json")
    assert ended.code == 0, ended
    told = json.loads(ended.out)
    assert "calibrated on 40 given inputs" in told["calibration"]
    assert not any("so this is" in note for note in told["notes"])
    assert run("score", "m.dap", "far.npz", "--model", "own_nets:numbers", "-o", "far.csv").code == 0
    assert run("score", "m.dap", "numbers-new.npz", "--model", "own_nets:numbers", "-o", "near.csv").code == 0
    assert (table("far.csv")["ood"] == "true").mean() > 0.9
    assert (table("near.csv")["ood"] == "true").mean() < 0.2


def test_a_module_itself_serves_as_factory():
    torch.save({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, "line.pth")
    ended = run(*given(model="own_nets:Nested.line", weights="line.pth"))
    assert ended.code == 0, ended
    assert "RMSE" in ended.out
    assert "Saved to m.dap" in ended.out


def test_the_file_never_has_its_code_imported(saved):
    Path("own_nets.py").unlink()
    Path("own_nets.py").write_text("raise SystemError('imported')")
    error = refused("score", saved / "images.dap", "images-new.npz", "-o", "scores.csv")
    assert "--model 'own_nets:images'" in error
    assert "own_nets" not in sys.modules


# Folders of images


def write_images(folder: Path, x: np.ndarray) -> None:
    (folder / "deeper").mkdir(parents=True)
    for number, image in enumerate(x):
        place = folder / ("deeper" if number % 2 else ".") / f"{number:03}.png"
        Image.fromarray((255 * image[0]).round().astype(np.uint8)).save(place)


def test_a_folder_of_images_gives_what_its_pixels_give(saved):
    x = (255 * np.clip(images(10, 2)[0], 0, 1)).round() / 255
    write_images(Path("pictures"), x)
    (Path("pictures") / "notes.txt").write_text("no image")
    np.savez("same.npz", x=np.stack([*x[::2], *x[1::2]]).astype(np.float32))  # "deeper" comes after the digits
    model = ["--model", "own_nets:images"]
    assert run("score", saved / "images.dap", "pictures", *model, "-o", "a.csv", "--batch-size", 3).code == 0
    assert run("score", saved / "images.dap", "same.npz", *model, "-o", "b.csv").code == 0
    one, two = table("a.csv"), table("b.csv")
    assert list(one["file"]) == [f"{n:03}.png" for n in range(0, 10, 2)] + [
        f"deeper/{n:03}.png" for n in range(1, 10, 2)
    ]
    np.testing.assert_allclose(one["probability_0"].astype(float), two["probability_0"].astype(float), atol=1e-5)
    assert run("score", saved / "images.dap", "pictures", *model, "-o", "a.npz").code == 0
    with np.load("a.npz") as found:
        assert found["file"].tolist() == list(one["file"])


def test_images_are_normalised_resized_and_turned_grey(saved):
    x = images(4, 2)[0]
    write_images(Path("pictures"), x)
    model = ["--model", "own_nets:images"]
    for path in Path("pictures").rglob("*.png"):
        with Image.open(path) as image:
            larger = image.convert("RGB").resize((16, 16), Image.Resampling.NEAREST)
        larger.save(path)
    assert "--resize" in refused("score", saved / "images.dap", "pictures", *model, "-o", "a.csv")
    options = ["--resize", "--mean", "0.5", "--std", "0.25"]
    assert run("score", saved / "images.dap", "pictures", *model, "-o", "a.csv", *options).code == 0
    pixels = []
    for path in sorted(Path("pictures").rglob("*.png")):
        with Image.open(path) as image:
            pixels.append(np.asarray(image.convert("L").resize((8, 8), Image.Resampling.BILINEAR))[None])
    np.savez("same.npz", x=((np.stack(pixels) / 255 - 0.5) / 0.25).astype(np.float32))
    assert run("score", saved / "images.dap", "same.npz", *model, "-o", "b.csv").code == 0
    one, two = table("a.csv"), table("b.csv")
    np.testing.assert_allclose(one["probability_1"].astype(float), two["probability_1"].astype(float), atol=1e-5)


def test_a_broken_image_is_named_and_nothing_is_written(saved):
    write_images(Path("pictures"), images(6, 2)[0])
    broken = Path("pictures") / "deeper" / "003.png"
    broken.write_bytes(broken.read_bytes()[:60])
    assert "003.png" in refused("score", saved / "images.dap", "pictures", "--model", "own_nets:images", "-o", "s.csv")


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        ("images", [], "no images in"),
        ("images", ["--std", "0"], "std"),
        ("images", ["--mean", "a,b"], "--mean"),
        ("images", ["--mean", "1,2,3,4"], "1 or 1 numbers"),
        ("numbers", [], "npz file"),
    ],
)
def test_an_empty_folder_or_odd_options_are_refused(saved, kind, options, match):
    Path("pictures").mkdir()
    model = ["--model", f"own_nets:{kind}"]
    assert match in refused("score", saved / f"{kind}.dap", "pictures", *model, "-o", "s.csv", *options)


# What is wrong is said in one line


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"model": "own_nets"}, "package.module:factory"),
        ({"model": "own_nets.py:numbers"}, "is nets:make"),
        ({"model": "own_missing:numbers"}, "no module own_missing"),
        ({"model": "own_nets:absent"}, "no absent in own_nets"),
        ({"model": "own_nets:breaks"}, "ZeroDivisionError"),
        ({"model": "own_nets:needs"}, "without arguments"),
        ({"model": "own_nets:none"}, "nn.Module, got int"),
        ({"model": "own_nets:empty"}, "parameters"),
        ({"model": "own_nets:a_list"}, "got list"),
        ({"model": "own_nets:wider"}, "`0.weight` is (16, 2) there and (17, 2) here, and 2 more differ"),
        ({"model": "own_nets:named"}, "lacks `3.weight`, `3.bias` and has `2.bias`, `2.weight`"),
        ({"weights": "absent.pt"}, "no file absent.pt"),
        ({"weights": "own_nets.py"}, ".safetensors, .pt or .pth"),
        ({"weights": "images-0.safetensors"}, "another model"),
        ({"train": "absent.npz"}, "no file absent.npz"),
        ({"held_out": "."}, "is a folder"),
        ({"train": "images-train.npz"}, "cannot run on inputs of shape (1, 8, 8)"),
        ({"held_out": "images-val.npz"}, "held_out"),
        ({"posterior": "variational"}, "last-layer or laplace"),
        ({"task": "ranking"}, "counts or regression"),
        ({"task": "classification"}, "fractions"),
        ({"classes": "a,b"}, "regression"),
        ({"device": "tpu"}, "no device"),
        ({"out": "."}, "is a folder"),
        ({"out": "absent/m.dap"}, "does not exist"),
        ({"out": "numbers-train.npz"}, "overwrite"),
    ],
)
def test_a_wrong_option_is_refused(changed, match):
    assert match in refused(*given(**changed))


def test_wrong_classes_and_an_ensemble_with_a_posterior_are_refused():
    assert "3 different `classes`" in refused(*given("images", classes="a,b"))
    assert "3 different `classes`" in refused(*given("images", classes="a,b,b"))
    several = [*given("images"), "--weights", "images-1.safetensors", "--posterior", "laplace"]
    assert "ensemble" in refused(*several)


def test_a_module_that_fails_on_import_is_told_of():
    Path("own_broken.py").write_text("import own_absent_package\n")
    assert "install what it needs" in refused(*given(model="own_broken:make"))
    Path("own_script.py").write_text("import sys\nsys.exit(3)\n")
    assert "__main__" in refused(*given(model="own_script:make"))


class Pickled:
    pass


def test_weights_that_could_run_code_or_are_damaged_are_refused():
    torch.save(nn.Linear(2, 1), "module.pt")
    assert "state_dict()" in refused(*given(weights="module.pt"))
    Path("pickled.pt").write_bytes(pickle.dumps({"a": Pickled}))
    assert "pickled.pt" in refused(*given(weights="pickled.pt"))
    Path("short.pt").write_bytes(Path("numbers.pt").read_bytes()[:700])
    assert "short.pt is damaged" in refused(*given(weights="short.pt"))
    Path("short.safetensors").write_bytes(Path("numbers-0.safetensors").read_bytes()[:60])
    assert "truncated" in refused(*given(weights="short.safetensors"))
    torch.save([1, 2], "list.pt")
    assert "got list" in refused(*given(weights="list.pt"))
    state = torch.load("numbers.pt", weights_only=True)
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, "parallel.pt")
    assert "DataParallel" in refused(*given(weights="parallel.pt"))
    state["0.bias"][0] = torch.nan
    torch.save(state, "nan.pt")
    assert "NaN or inf in `0.bias`" in refused(*given(weights="nan.pt"))


def test_a_softmax_in_the_model_is_noticed():
    torch.save({"0.weight": torch.ones(2, 2), "0.bias": torch.zeros(2)}, "soft.pt")
    np.savez("two.npz", x=numbers(40, 0)[0], y=np.arange(40) % 2)
    changed = {"model": "own_nets:softmax", "weights": "soft.pt", "train": "two.npz", "held_out": "two.npz"}
    assert "logits" in refused(*given(**changed))


X, Y = numbers(40, 0)


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({}, "no array `x`"),
        ({"a": X, "y": Y}, "holds `a`, `y`"),
        ({"x": X}, "no array `y`"),
        ({"x": X[:0], "y": Y[:0]}, "at least one row"),
        ({"x": X, "y": Y[:-1]}, "40 in `x` and 39 in `y`"),
        ({"x": np.where(X > 2, np.nan, X), "y": Y}, "NaN or inf"),
        ({"x": X, "y": np.where(Y > 2, np.inf, Y)}, "finite targets"),
        ({"x": (X > 0).astype(np.uint8), "y": Y}, "/ 255"),
        ({"x": X > 0, "y": Y}, "got bool"),
        ({"x": X.astype(str), "y": Y}, "floating-point"),
        ({"x": X, "y": Y.astype(str)}, "whole numbers from 0"),
        ({"x": X.astype(object), "y": Y}, "Python objects"),
        ({"x": X.astype(np.int64), "y": Y}, "torch.int64"),
        ({"x": X[:, 0], "y": Y}, "x[:, None]"),
        ({"x": X, "y": np.ones(40)}, "all are the same"),
        ({"x": X, "y": np.zeros((40, 2))}, "targets of shape"),
    ],
)
def test_odd_arrays_are_refused(arrays, match):
    np.savez("odd.npz", **arrays)
    assert match in refused(*given(train="odd.npz"))


def test_classes_as_fractions_are_noticed():
    x, y = images(60, 0)
    np.savez("fractions.npz", x=x, y=y.astype(float))
    changed = {"train": "fractions.npz", "held_out": "fractions.npz"}
    assert "whole numbers" in refused(*given("images", **changed))
    ended = run(*given("images", train="fractions.npz", task="classification"))
    assert ended.code == 0, ended


def test_one_class_or_classes_beyond_the_outputs_are_refused():
    x, y = images(60, 0)
    np.savez("one.npz", x=x, y=0 * y)
    assert "at least 2 classes" in refused(*given("images", train="one.npz"))
    np.savez("four.npz", x=x, y=y + 1)
    assert "between 0 and 2" in refused(*given("images", train="four.npz"))
    np.savez("known.npz", x=x, y=np.minimum(y, 1))
    assert "never in `train`" in refused(*given("images", train="known.npz", task="classification"))


def test_what_targets_leave_in_doubt_is_asked_for():
    """As `dapcal.calibrate` asks for a likelihood, `dapcal calibrate` asks for a task."""
    x, y = images(60, 0)
    two, rows = np.minimum(y, 1), np.eye(3)[y]
    for name, targets, meant in (
        ("zeros and ones", (Y > 0).astype(float), "which may be classes"),
        ("one-hot", rows, "one-hot classes"),
        ("a class that is missing", two, "2 different targets from 0 to 1"),
    ):
        inputs, kind = (X, "numbers") if len(targets) == len(X) else (x, "images")
        np.savez("doubtful.npz", x=inputs, y=targets)
        found = refused(*given(kind, train="doubtful.npz", held_out="doubtful.npz"))
        assert meant in found, (name, found)
        assert "name the task, --task classification" in found
    x, y = images(60, 1)
    np.savez("others.npz", x=x, y=np.minimum(y, 1))
    ended = run(*given("images", train="doubtful.npz", held_out="others.npz", task="classification"))
    assert ended.code == 0, ended


@pytest.mark.parametrize("end", [0, 50, -3000, -100])
def test_a_truncated_file_is_refused(end):
    Path("short.npz").write_bytes(Path("numbers-train.npz").read_bytes()[:end])
    assert "short.npz cannot be read as an npz file" in refused(*given(train="short.npz"))


def test_a_damaged_array_is_refused(saved):
    data = bytearray(Path("numbers-train.npz").read_bytes())
    data[1000] ^= 255
    Path("damaged.npz").write_bytes(data)
    assert "damaged.npz cannot be read" in refused(*given(train="damaged.npz"))
    score_it = ["score", saved / "numbers.dap", "damaged.npz", "--model", "own_nets:numbers", "-o", "s.csv"]
    assert "damaged.npz cannot be read" in refused(*score_it)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"file": "absent.dap"}, "no file absent.dap"),
        ({"file": "numbers-train.npz"}, "not an artefact"),
        ({"inputs": "absent.npz"}, "no file absent.npz"),
        ({"inputs": "images-new.npz"}, "images-new.npz: Expected inputs of shape (2,), as in training, got (1, 8, 8)"),
        ({"inputs": "bytes.npz"}, "/ 255"),
        ({"inputs": "late.npz"}, "NaN or inf in row 300; drop or impute"),
        ({"model": "own_nets:images"}, "another model"),
        ({"model": "own_nets:wider"}, "another model"),
        ({"model": "own_absent:numbers"}, "no module"),
        ({"out": "."}, "is a folder"),
        ({"out": "absent/s.csv"}, "does not exist"),
        ({"out": "s.parquet"}, ".csv or .npz"),
        ({"level": 1.5}, "--level"),
        ({"mean": "0.5"}, "folders of images"),
        ({"device": "nowhere"}, "--device"),
    ],
)
def test_what_cannot_be_scored_is_refused(saved, changed, match):
    np.savez("bytes.npz", x=np.zeros((3, 2), np.uint8))
    late = np.zeros((400, 2), np.float32)
    late[300] = np.nan
    np.savez("late.npz", x=late)
    options = {"file": saved / "numbers.dap", "inputs": "numbers-new.npz", "model": "own_nets:numbers", "out": "s.csv"}
    options |= changed
    arguments = [options.pop("file"), options.pop("inputs")]
    named = [part for name, value in options.items() for part in (f"--{name}", value)]
    assert match in refused("score", *arguments, *named)


def test_too_few_held_out_inputs_to_flag_any_are_told(saved):
    arguments = ["score", saved / "numbers.dap", "numbers-new.npz", "--model", "own_nets:numbers", "-o", "s.csv"]
    assert "nothing can be flagged at 1e-06" in run(*arguments, "--alpha", "1e-6").err
    assert "nothing can be flagged" not in run(*arguments).err


def test_an_output_that_fails_keeps_the_earlier_file(saved):
    Path("scores.csv").write_text("earlier")
    late = np.zeros((400, 2), np.float32)
    late[300] = np.nan
    np.savez("late.npz", x=late)
    refused("score", saved / "numbers.dap", "late.npz", "--model", "own_nets:numbers", "-o", "scores.csv")
    assert Path("scores.csv").read_text() == "earlier"


def test_errors_as_json_say_the_same():
    ended = run(*given(model="own_absent:make"), "--json")
    assert ended.code == 2
    assert "no module own_absent" in json.loads(ended.out)["error"]


def test_python_draws_come_with_advice(saved):
    """A file that Calibrated.save wrote says nothing of what it predicts."""
    from dapcal import artifact

    model = network("numbers", "numbers-0.safetensors")
    artifact.load(saved / "numbers.dap", model).save("plain.dap")
    error = refused("score", "plain.dap", "numbers-new.npz", "--model", "own_nets:numbers", "-o", "s.csv")
    assert "dapcal.load" in error
