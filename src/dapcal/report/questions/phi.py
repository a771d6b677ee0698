"""How φ was chosen: calibration loss, held-out likelihood and guard over φ."""

from __future__ import annotations

import math

import torch

from dapcal.calibration.search import Curve
from dapcal.report.examples import Examples
from dapcal.report.kit.markup import Captioned, figures, paragraph
from dapcal.report.kit.numbers import number
from dapcal.report.kit.svg import Plot, Scale, covering


def measure(examples: Examples) -> Curve:
    """The curve of φ with the NLL of targets as people see them."""
    subject = examples.subject
    curve, unit = subject.calibrated.curve, 0.0
    if not subject.is_classification:
        chose = subject.calibrated.chooses
        y = subject.held_out.y.cpu() if chose is None else subject.held_out.y.cpu()[chose.cpu()]
        unit = float(subject.unit.log_slopes(y).mean())
    return Curve(
        phi=curve.phi.cpu(),
        loss=curve.loss.cpu(),
        nll=curve.nll.cpu() + unit,
        base_loss=curve.base_loss,
        base_nll=curve.base_nll + unit,
        guard=curve.guard + unit,
        error=curve.error.cpu(),
    )


def section(examples: Examples, curve: Curve) -> str:
    """The two curves, and what the choice costs."""
    if not examples.subject.calibrated.distance.spaces:
        return paragraph("No distance counts (the notes below say why), so there was no φ to choose.")
    if not examples.subject.calibrated.adjust.heeds_distance:
        return paragraph("Predictions are not adjusted to distance, so there is no φ to choose.")
    chosen = examples.subject.calibrated.phi
    lead = "One number, φ, says how much distance counts. The one with the smallest calibration loss is taken"
    guard = ", among those that do not make predictions on held-out data worse than the guard allows."
    band = "The grey band adds what few rows may hide, and stays under the guard where a φ is allowed."
    if math.isinf(curve.guard):
        guard = "; no guard keeps predictions on held-out data from getting worse."
        band = "The grey band adds what few rows may hide."
    there = float(curve.nll[(curve.phi - chosen).abs().argmin()])
    rise = f"At the chosen φ it is {number(there)}, without distance {number(curve.base_nll)}."
    loss, nll = charts(curve, chosen)
    return (
        paragraph(lead + guard)
        + figures(
            [
                Captioned(loss, "Calibration loss", "Lower is better. The notes below say on which inputs."),
                Captioned(nll, "Held-out negative log-likelihood", f"{rise} {band}"),
            ]
        )
        + paragraph(
            "The likelihood is that of the half of the held-out data that chooses φ, so it is not a test.", "small"
        )
    )


def charts(curve: Curve, phi: float) -> tuple[str, str]:
    """Calibration loss and held-out NLL over φ, where they change; what rises far above is cut off."""
    low, high = _where_it_changes(curve, phi)
    columns = (curve.phi, curve.loss, curve.nll, curve.nll + curve.error)
    tried = [row for row in zip(*(column.tolist() for column in columns), strict=True) if low <= row[0] <= high]
    loss = [(place, value) for place, value, _, _ in tried if math.isfinite(value)]
    nll = [(place, value) for place, _, value, above in tried if math.isfinite(above)]
    upper = [(place, above) for place, _, _, above in tried if math.isfinite(above)]
    chosen = f"chosen φ = {number(phi)}"

    def level(value: float) -> list[tuple[float, float]]:
        return [(low, value), (high, value)]

    least = min(curve.base_loss, *(value for _, value in loss))
    at_chosen = min(loss, key=lambda point: abs(point[0] - phi))[1]
    room = max(curve.base_loss - least, at_chosen - least, 0.005 * abs(curve.base_loss)) or 1.0
    plot = Plot(Scale(low, high), Scale(least - 0.1 * room, max(curve.base_loss, at_chosen) + 0.4 * room))
    upright = [(phi, plot.y.low), (phi, plot.y.high)]
    loss_chart = plot.drawing(
        f"Calibration loss over φ; {chosen}",
        plot.axes("φ", "calibration loss"),
        plot.clipped(plot.line(loss, "after")),
        plot.horizontal(curve.base_loss, "without distance", "reference", [loss, upright]),
        plot.vertical(phi, chosen),
    )

    has_guard = math.isfinite(curve.guard)
    least = min(curve.base_nll, *(value for _, value in nll))
    most = curve.base_nll + 2.5 * (curve.guard - curve.base_nll) if has_guard else max(value for _, value in nll)
    plot = Plot(Scale(low, high), covering([least, most]))
    upright = [(phi, plot.y.low), (phi, plot.y.high)]
    guard = level(curve.guard) if has_guard else []
    nll_chart = plot.drawing(
        f"Held-out negative log-likelihood over φ, and the guard on it; {chosen}",
        plot.axes("φ", "held-out NLL (nats)"),
        plot.clipped(plot.area(nll, upper, "band"), plot.line(nll, "after")),
        plot.horizontal(curve.base_nll, "without distance", "reference", [nll, upright, guard]),
        plot.horizontal(curve.guard, "guard", "limit", [nll, upright, level(curve.base_nll)]) if has_guard else "",
        plot.vertical(phi, chosen),
    )
    return loss_chart, nll_chart


def _where_it_changes(curve: Curve, phi: float) -> tuple[float, float]:
    """The values of φ between which loss or NLL move, with the chosen one well inside."""
    moved = torch.zeros(len(curve.phi), dtype=torch.bool)
    for values, base in ((curve.loss, curve.base_loss), (curve.nll, curve.base_nll)):
        offset = (values - base).abs()
        finite = offset[offset.isfinite()]
        if len(finite) and float(finite.max()) > 0:
            moved |= offset > 0.01 * float(finite.median().clamp_min(0.01 * float(finite.max())))
    places = curve.phi[moved]
    low = min(float(places.min()) if len(places) else phi, phi - 3)
    high = min(max(float(places.max()) if len(places) else phi, phi + 3), phi + 8)
    return max(low, float(curve.phi.min())), min(high, float(curve.phi.max()))
