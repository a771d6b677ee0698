"""The figures of the tutorials and of the method pages, drawn from what the tutorials' own code computes.

Run: python docs/figures.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import dapcal
from dapcal.adjust import Reweight, Transport
from dapcal.distances import Space
from dapcal.distances.projectors import Identity
from dapcal.experiments.plots import BLUE, GREY, ORANGE, RED, calibration_panel, new_figure, style
from dapcal.files import complete_or_absent
from dapcal.predictive import Prediction

DOCS = Path(__file__).parent.resolve()


def main() -> None:
    """Draw all of them into the folder of this file."""
    torch.set_num_threads(1)
    waves, digits = page_variables("tutorial-regression.md"), page_variables("tutorial-cnn.md")
    with style(), warnings.catch_warnings():
        warnings.simplefilter("ignore", dapcal.DapcalWarning)  # the paper's estimator collapses, and says so
        for name, figure in (
            ("tutorial-regression", intervals(waves)),
            ("tutorial-cnn", nines(digits)),
            ("method-distance", distance(waves)),
            ("method-adjustments", adjustments(waves)),
            ("method-calibration", calibration(digits)),
        ):
            with complete_or_absent(DOCS / f"{name}.png") as part:
                figure.savefig(part, format="png", metadata={"Software": None})
    if shutil.which("chromium"):
        report()


def report() -> None:
    """The top of the report that the commands of the tutorial on a table make, as a browser shows it."""
    from playwright.sync_api import sync_playwright

    text = (DOCS / "tutorial-table.md").read_text(encoding="utf-8")
    commands = [code for code in re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S) if "serve" not in code]
    tools = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as folder:
        write_table = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)[0]
        subprocess.run([sys.executable, "-c", write_table], cwd=folder, check=True)
        for code in commands:
            subprocess.run(["bash", "-euc", code], cwd=folder, env=tools, check=True, stdout=subprocess.DEVNULL)
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1000, "height": 1080}, color_scheme="light")
            page.goto(f"file://{folder}/report.html")
            page.screenshot(path=DOCS / "tutorial-table.png")
            browser.close()


def page_variables(page: str) -> dict[str, Any]:
    """What is defined after the python blocks of a page have run, in a folder that is thrown away."""
    code = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)
    variables: dict[str, Any] = {}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            torch.manual_seed(0)
            exec(compile("\n".join(code), page, "exec"), variables)
        finally:
            os.chdir(before)
    return variables


def intervals(waves: dict[str, Any]) -> Figure:
    """95 % intervals before and after."""
    x = torch.linspace(-5.5, 5.5, 441)[:, None]
    prediction = waves["calibrated"](x)
    figure, axes = new_figure(2, width=4.2)
    for panel, one, title in zip(axes, (prediction.base, prediction), ("Laplace alone", "with distance"), strict=True):
        lower, upper = one.interval(0.95)
        panel.fill_between(x[:, 0], lower[:, 0], upper[:, 0], color=BLUE, alpha=0.22, lw=0, label="95 % interval")
        _curve(panel, x, one, waves["train"], title)
    axes[0].legend(fontsize=7, loc="upper left", markerscale=3)
    return figure


def nines(digits: dict[str, Any]) -> Figure:
    """Nines with what they are taken for, and p-values of everything."""
    images, prediction = digits["nines"], digits["outside"]
    order = prediction.base.probs.max(1).values.argsort(descending=True)
    shown = order[:: len(order) // 8][:8]
    figure = Figure(figsize=(8.4, 4.6))
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.6))
    for panel, row in zip(top.subplots(1, 8), shown.tolist(), strict=True):
        panel.imshow(images[row, 0], cmap="gray_r")
        label = int(prediction.base.probs[row].argmax())
        before, after = (float(one.probs[row].max()) for one in (prediction.base, prediction))
        panel.set_title(f"“{label}”\n{before:.2f} → {after:.2f}", fontsize=8, loc="center")
        panel.set_axis_off()
    panel = bottom.subplots()
    for name, color, one in (("test", BLUE, "inside"), ("nines", ORANGE, "outside"), ("noise", RED, "noise")):
        values = digits[one].ood_p_value.sort().values
        panel.step(values, torch.arange(1, len(values) + 1) / len(values), color=color, label=name, where="post")
    panel.plot([0, 1], [0, 1], color=GREY, lw=0.8, ls="--", label="uniform")
    panel.set(xlabel="p-value", ylabel="share of images below", xlim=(0, 1), ylim=(0, 1.02))
    panel.legend(fontsize=8)
    return figure


def distance(waves: dict[str, Any]) -> Figure:
    """The prior, the distance with its radius, and what a wider prior does to the posterior of one weight."""
    figure, axes = new_figure(3, width=3.4)
    theta = torch.linspace(-8, 8, 400)
    for d, color in ((0.0, BLUE), (1.0, ORANGE), (2.0, RED)):
        density = torch.distributions.Normal(0, 1 + d).log_prob(theta).exp()
        axes[0].plot(theta, density, color=color, label=f"d = {d:.0f}")
    axes[0].set(title="prior of a weight, σ0 = 1", xlabel="θ")
    axes[0].legend(fontsize=8)

    x = torch.linspace(-5, 5, 800)[:, None]
    space = Space(Identity()).fit(waves["train"][0], waves["held_out"][0], waves["posterior"])
    assert space.radius is not None
    raw = space.raw(x)
    axes[1].plot(x[:, 0], raw, color=GREY, label="to the nearest training input")
    zoom = axes[1].inset_axes((0.37, 0.5, 0.28, 0.36))
    for panel in (axes[1], zoom):
        panel.plot(waves["train"][0][:, 0], torch.zeros(len(waves["train"][0])), "|", color=RED, ms=6)
    zoom.plot(x[:, 0], raw, color=GREY)
    zoom.axhline(space.radius.start, color=BLUE, lw=1)
    zoom.set(xlim=(0.75, 1.35), ylim=(-0.01, 0.12), xticks=[], yticks=[])
    zoom.set_title("radius", fontsize=7, color=BLUE)
    axes[1].set(title="distance of an input", xlabel="x", ylim=(-0.1, 2.3))

    distances = torch.linspace(0, 4, 200)
    drop = 1 - 1 / (1 + distances) ** 2
    for sigma, color, label in (
        (0.3, BLUE, "data decide"),
        (0.9, ORANGE, "data say a little"),
        (1.0, RED, "prior alone"),
    ):
        axes[2].plot(distances, (1 - drop * sigma**2).rsqrt(), color=color, label=f"{label}, σ = {sigma}")
    axes[2].set(title="spread of a weight, as a multiple", xlabel="d, in units of σ0")
    axes[2].legend(fontsize=7)
    return figure


def adjustments(waves: dict[str, Any]) -> Figure:
    """One posterior, adjusted in three ways."""
    train, held_out, posterior = waves["train"], waves["held_out"], waves["posterior"]
    data = {"train": train, "held_out": held_out}
    paper = dapcal.calibrate(posterior, **data, adjust=Reweight(), guard=None, distance=Space(Identity(), radius=None))
    transport = dapcal.calibrate(posterior, **data, adjust=Transport())
    x = torch.linspace(-5.5, 5.5, 221)[:, None]
    ours = waves["calibrated"](x)
    panels = (
        ("alone", ours.base),
        ("Reweight: the paper", paper(x)),
        ("Transport", transport(x)),
        ("Inflate: the default", ours),
    )
    figure, axes = new_figure(4, width=2.7, height=2.7)
    for panel, (title, prediction) in zip(axes, panels, strict=True):
        half = 1.96 * prediction.epistemic[:, 0].clamp_min(0).sqrt()
        mean = prediction.mean[:, 0]
        panel.fill_between(x[:, 0], mean - half, mean + half, color=BLUE, alpha=0.22, lw=0)
        _curve(panel, x, prediction, train, title)
    return figure


def calibration(digits: dict[str, Any]) -> Figure:
    """The loss over φ with its guard, and confidence over distance before and after."""
    figure, axes = new_figure(2, width=4.6, height=3.7)
    calibration_panel(axes[0], digits["calibrated"], "choosing φ")
    for name, color in (("inside", BLUE), ("outside", ORANGE), ("noise", RED)):
        one = digits[name]
        label = {"inside": "test", "outside": "nines"}.get(name, name)
        for prediction, marker, alpha in ((one.base, "x", 0.25), (one, "o", 0.6)):
            confidence = prediction.probs.max(1).values
            shown = label if marker == "o" else None
            axes[1].scatter(one.pre_distance + 0.1, confidence, s=9, c=color, marker=marker, alpha=alpha, label=shown)
    axes[1].set(xscale="log", xlabel="d0 + 0.1 (left edge: inside the radius)", ylabel="confidence")
    axes[1].set_title("before (×) and after (●)")
    axes[1].legend(fontsize=7, loc="lower left")
    return figure


def _curve(panel: Axes, x: Tensor, prediction: Prediction, train: tuple[Tensor, Tensor], title: str) -> None:
    panel.plot(x[:, 0], (2 * x[:, 0]).sin(), color=GREY, lw=0.8, ls="--", label="sin(2x)")
    panel.plot(x[:, 0], prediction.mean[:, 0], color=BLUE, lw=1.3, label="prediction")
    panel.scatter(*(part[:, 0].numpy() for part in train), s=3, c=RED, lw=0, alpha=0.5, label="training data")
    panel.set(title=title, xlabel="x", xlim=(-5.5, 5.5), ylim=(-5, 5))


if __name__ == "__main__":
    main()
