"""The section of an image experiment on the results page: the paper's table, every score, predictions, other rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dapcal.experiments.images.methods import PARTS
from dapcal.experiments.page import image_figures as figures
from dapcal.experiments.page import photographs
from dapcal.experiments.page.cells import (
    NOTHING,
    beside,
    decimal,
    marks,
    median,
    number,
    power,
    show,
    table,
)
from dapcal.experiments.page.drawings import Drawing
from dapcal.experiments.page.files import ImageResults, Row, Source, rows_of
from dapcal.experiments.published import EARLIER, IMAGES, PHI

PAPERS, OURS = "DAP, paper's", "DAP, ours"
SCORES = ("OOD score", "entropy", "confidence", "epistemic", "distance", "p-value")
PAIRS = (
    "One network + DAP, ours", "VI", OURS, "DAP, ours, by Transport", "DE", "DE + DAP, ours", "Laplace, last layer",
    "Laplace + DAP, ours", "SWAG", "SWAG + DAP, ours", "MC dropout", "MC dropout + DAP, ours",
)  # fmt: skip
"""Every posterior, followed by what our default makes of it."""

Block = str | Drawing


def section(results: ImageResults) -> list[Block]:
    """Text, tables and figures, in the order of the page."""
    blocks: list[Block] = [f"## {results.settings['inside']}", *photographs.unfinished(results)]
    blocks += ["### Setting", _setup(results), *photographs.about(results)]
    blocks += _papers_table(results)
    blocks += figures.detection(results)
    blocks += _every_score(results)
    blocks += figures.scores(results)
    blocks += _predictions(results)
    blocks += figures.predictions(results)
    blocks += _weights(results)
    blocks += figures.calibration(results)
    blocks += _part(results, PARTS["paper"], results.of_part("paper"))
    paired = [results.rows[name] for name in PAIRS if name in results.rows]
    if any(row.part == "ours" for row in paired):
        title = f"{PARTS['ours']}; {PARTS['posteriors'][0].lower()}{PARTS['posteriors'][1:]}"
        blocks += _part(results, title, paired, f"“{OURS}” is that of VI, with the default adjustment.")
    for part in ("newer", "questions", "oracle", "trained"):
        blocks += _part(results, PARTS[part], results.of_part(part), _ABOUT.get(part, ""))
    return [*blocks, *photographs.further(results), *photographs.collapse(results)]


def where(source: Source) -> str:
    """Device, versions and seeds of a file, in words.

    >>> where(Source("a.json", (0, 1), {"torch": "2.4", "device": "cpu"}, {}))
    'seeds 0, 1; torch 2.4, cpu'
    """
    seeds = f"seed{'s' if len(source.seeds) > 1 else ''} {', '.join(map(str, source.seeds))}"
    versions = [f"{tool} {own}" for tool, own in source.environment.items() if tool not in ("device", "commit")]
    return f"{seeds}; {', '.join([*versions, source.environment['device']])}"


def _setup(results: ImageResults) -> str:
    settings = results.settings
    inside, outside = settings["inside"], ", ".join(results.outside)
    how = settings.get("how") or (
        f"{settings['epochs']} epochs in batches of {settings['batch_size']}, Adam at {settings['learning_rate']:g} "
        f"(variational: {settings['variational_rate']:g}), falling to zero along a cosine; {settings['draws']} draws "
        "of every posterior"
    )
    text = (
        f"{settings['network'].rstrip('.')}; {how}, ensembles of {settings['members']}, "
        f"{settings['held_out']} training images held out. Inside the distribution: {inside}, its test set. Outside: "
        f"{outside}."
    )
    for other in results.sources[1:]:
        changed = {name: value for name, value in other.settings.items() if value != settings.get(name)}
        words = "".join(f"; {name} {value} in place of {settings.get(name)}" for name, value in changed.items())
        text += (
            f" Rows that `{results.sources[0].name}` does not have come from `{other.name}` ({where(other)}{words}); "
            "their tables begin with rows of that same run, which alone they can be compared with."
        )
    return text


def _papers_table(results: ImageResults) -> Iterable[Block]:
    """The paper's table, its numbers beside ours."""
    published = IMAGES.get(results.experiment, {})
    shown = [(row.name, row, row.score) for row in results.of_part("paper")]
    for name in _ours(results):
        ours = results.rows[name]
        shown += [(f"{name}: {score}", ours, score) for score in (ours.score, "entropy")]
    rows = []
    for label, row, score in shown:
        paper = published.get(row.name)
        cells = [beside(number(row.values("test", "accuracy"), 100), paper.accuracy if paper else None, 1)]
        for name in results.outside:
            both = paper.detection.get(name, (None, None)) if paper else (None, None)
            for metric, value in zip(("auroc", "aucpr"), both, strict=True):
                cells.append(beside(number(row.values("ood", score, name, metric), 100), value, 1))
        rows.append([label, *cells])
    phi = {row.name: number(row.values("facts", "phi")) for _, row, _ in shown}
    for (_, row, _), cells in zip(shown, rows, strict=True):
        known = f" ({decimal(PHI[results.experiment], 2)})" if row.name == PAPERS and results.experiment in PHI else ""
        cells.append(show(phi[row.name], 2) + known)
    head = ["", "accuracy", *(f"{n}: {m}" for n in results.outside for m in ("AUROC", "AUCPR")), "φ"]
    compared, marked = marks([row[:-1] for row in rows])
    yield "### The paper's table"
    yield table(head, rows)
    yield (
        f"In brackets: the paper. Of {compared} numbers that it has, {compared - marked} are within two points or two "
        "standard errors of ours. Scores are the paper's own: entropy for MAP, DE and VI, the density for DDU, "
        "confidence for DAP. φ of our default is of another distance and another adjustment, and not to be compared."
    )
    yield from _by_seed(results)
    yield from _earlier(results)
    if "ODIN" in results.rows and (steps := results.rows["ODIN"].values("facts", "epsilon")):
        yield f"ODIN's steps, which held-out images choose, by seed: {', '.join(f'{step:g}' for step in steps)}."


def _ours(results: ImageResults) -> list[str]:
    """Rows of our default that stand beside the paper's."""
    return [name for name in (OURS, *results.settings.get("beside", ())) if name in results.rows]


def _by_seed(results: ImageResults) -> Iterable[str]:
    """The paper's estimator under every seed: it adds little to the distance, which depends on the network."""
    row = results.rows.get(PAPERS)
    if row is None or len(row.runs) < 2:
        return
    found = {
        far: ", ".join(
            f"{100 * value:.1f}" for value in row.values("ood", row.score, far, "auroc") if value is not None
        )
        for far in results.outside
    }
    listed = "; ".join(f"{far} {values}" for far, values in found.items())
    yield (
        "The score of the paper's DAP is nearly the bare distance between features of one MAP network (see the next "
        f"table), and as good as those features happen to be. Its AUROC by seed: {listed}."
    )


def _earlier(results: ImageResults) -> Iterable[str]:
    for name in results.outside if results.experiment in EARLIER else ():
        values = {row: found.detection.get(name) for row, found in EARLIER[results.experiment].items()}
        numbers = "; ".join(f"{row} {value[0]:.2f}" for row, value in values.items() if value)
        if numbers:
            yield (
                f"The paper's source also keeps an earlier table, commented out, with these AUROC on {name}: {numbers}."
            )


def _every_score(results: ImageResults) -> Iterable[Block]:
    rows = []
    for name in (*([PAPERS] if PAPERS in results.rows else []), *_ours(results)):
        for score in SCORES:
            cells = [
                show(number(results.rows[name].values("ood", score, far, metric), 100), 1)
                for far in results.outside for metric in ("auroc", "fpr95")
            ]  # fmt: skip
            rows.append([f"{name}: {score}", *cells])
    if not rows:
        return
    yield "### Every score of both DAPs"
    yield table(["", *(f"{far}: {metric}" for far in results.outside for metric in ("AUROC", "FPR95"))], rows)
    yield (
        "OOD score and p-value (its rank among held-out images) are ours in all rows; the distance is that before φ. "
        "An AUROC below 50 is of a score that points the wrong way: the entropy of probabilities that add up to W ≪ 1 "
        "(below) falls with W, and its epistemic part is cut off at 0. An FPR95 of 100 beside a good AUROC means ties: "
        "more than 5 % of those images share the lowest score with test images (our distance is 0 within its radius)."
    )


def _predictions(results: ImageResults) -> Iterable[Block]:
    metrics = {
        "accuracy": ("accuracy", 100, 1), "NLL": ("nll", 1, 3), "Brier": ("brier", 1, 3), "ECE": ("ece", 100, 1),
        "adaptive ECE": ("adaptive_ece", 100, 1), "selective risk": ("selective_risk", 100, 2),
    }  # fmt: skip
    rows = [
        [
            _label(results, row),
            *(show(number(row.values("test", key), scale), digits) for key, scale, digits in metrics.values()),
        ]
        for row in results.rows.values()
        if row.values("test", "accuracy")
    ]
    if rows:
        yield f"### Predictions on the test set of {results.settings['inside']}"
        yield table(["", *metrics], rows)
        yield (
            "Accuracy, calibration errors (ECE with 15 bins of equal width, adaptive with 15 of equal count) and "
            "selective risk in per cent. Selective risk is the error among the images that are kept, averaged over "
            "all shares kept, the most confident first. Methods that only score have no row." + _about_others(results)
        )


def _weights(results: ImageResults) -> Iterable[Block]:
    weighted = [row for row in results.rows.values() if row.curve("weights")]
    places = ("test", *results.outside)
    rows = []
    for row in weighted:
        medians = [
            median([run["weights"][place][kind][1] for run in row.runs])
            for place in places for kind in ("total weight", "ESS")
        ]  # fmt: skip
        rows.append(
            [_label(results, row), *(f(value) for f, value in zip([power, _two] * len(places), medians, strict=True))]
        )
    if rows:
        yield "### Importance weights"
        yield table(["", *(f"{place}: {kind}" for place in places for kind in ("W", "ESS"))], rows)
        yield (
            "W is the total weight of the draws at an input, 1 for a proper distribution; ESS is the effective number "
            f"of draws, of {results.settings['draws']} if not said otherwise (medians over inputs, then over seeds). "
            "Probabilities add up to W: where W ≪ 1 a method that reports them looks unsure because probability is "
            "lost, not because it spreads over classes, its NLL and calibration error on the test set pay for it, and "
            "an ESS near 1 says that a single draw predicts."
        )


def _part(results: ImageResults, title: str, rows: Sequence[Row], about: str = "") -> Iterable[Block]:
    if not rows:
        return
    others = [source for source in results.sources[1:] if any(row.source is source for row in rows)]
    references = [
        row for source in others for row in rows_of(results, source).values() if row.part == "paper" or row.name == OURS
    ]
    lines = [_line(results, f"*{row.name}*", row) for row in references]
    lines += [_line(results, row.name, row) for row in rows]
    head = [f"{metric} {name}" for metric in ("AUROC", "FPR95") for name in results.outside]
    yield f"### {title}"
    yield table(["", "score", *head, "accuracy", "NLL", "seeds"], lines, words=2)
    same = f"In italics: rows of the same run ({', '.join(f'`{s.name}`' for s in others)})." if references else ""
    if about or same:
        yield " ".join(filter(None, (about, same)))


def _line(results: ImageResults, label: str, row: Row) -> list[str]:
    detection = [
        show(number(row.values("ood", row.score, name, metric), 100), 1)
        for metric in ("auroc", "fpr95") for name in results.outside
    ]  # fmt: skip
    accuracy, nll = (number(row.values("test", key), scale) for key, scale in (("accuracy", 100), ("nll", 1)))
    score = NOTHING if row.score == "score" else row.score
    return [label, score, *detection, show(accuracy, 1), show(nll, 3), str(len(row.runs))]


def _label(results: ImageResults, row: Row) -> str:
    return row.name if row.source is results.sources[0] else f"{row.name} †"


def _about_others(results: ImageResults) -> str:
    return " † From another run, named at the top of this section." if len(results.sources) > 1 else ""


def _two(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


_ABOUT = {
    "oracle": "φ is calibrated on 1,000 images of the named OOD set, which are then tested on too: what no one could "
    "do in practice, to tell how much the choice of calibration inputs costs.",
    "trained": "Each is trained from the start for its own purpose, which takes minutes; hence fewer seeds.",
}
