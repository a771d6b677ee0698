"""What the results page opens with: one picture and one table of the methods that matter most, over all image pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.figure import Figure

from dapcal.experiments.page import bar
from dapcal.experiments.page.cells import show, table
from dapcal.experiments.page.drawings import BLACK, Drawing
from dapcal.experiments.page.files import ImageResults
from dapcal.experiments.page.pairs import Compared, Pair, methods_of, of_pairs, of_sets, pairs_of, spread
from dapcal.experiments.page.summary import calibration_error, ordered
from dapcal.experiments.plots import BLUE, GREY, ORANGE

ALWAYS = ("One network + DAP, ours", "DAP, ours", "MAP", "VI", "DAP, paper's", "DE", "DE + DAP, ours")
LABELS = {
    "One network + DAP, ours": "one network + ours", "DAP, ours": "VI + ours", "MAP": "one network alone (MAP)",
    "VI": "VI alone", "DAP, paper's": "VI + the paper's estimator", "DE": "ensemble alone",
    "DE + DAP, ours": "ensemble + ours",
}  # fmt: skip
BEST_OTHERS = 3
SETS = (BLUE, ORANGE, "#009e73", "#8b5fbf")


def opening(images: Sequence[ImageResults]) -> Iterable[str | Drawing]:
    """Picture, table, and what they say; nothing without images."""
    chosen = shown(images)
    if not chosen:
        return
    yield _picture(chosen, images)
    yield headline(chosen, images)
    yield (
        "AUROC in per cent: how surely a method tells images of other kinds from test images (50 is chance). Each "
        "column is the mean over the OOD sets of that data set, “all” over all pairs; NLL (nats) and ECE (per cent) "
        "of predictions on the test sets are lower the better. “–”: not measured on all of them, so no mean. The "
        "paper's probabilities do not sum to one, hence its NLL and ECE. Shown "
        f"are the posteriors, what our default makes of them, and the {BEST_OTHERS} best of the other methods; every "
        "method is below."
    )
    yield from _verdicts(images)


def shown(images: Sequence[ImageResults]) -> list[Compared]:
    """The rows that are always there and the best others, by mean AUROC over all pairs."""
    methods, pairs = methods_of(images), pairs_of(images)
    others = [one for one in ordered(methods, pairs) if one.name not in ALWAYS and "ours" not in one.name]
    best = [one.name for one in others if not one.missing(pairs)][:BEST_OTHERS]
    return ordered([one for one in methods if one.name in (*ALWAYS, *best)], pairs)


def headline(methods: Sequence[Compared], images: Sequence[ImageResults]) -> str:
    """Mean AUROC by data set and over all pairs, NLL and ECE."""
    pairs, sets = pairs_of(images), [found.settings["inside"] for found in images]
    groups = [[pair for pair in pairs if pair.inside == inside] for inside in sets] + [pairs]
    rows = []
    for one in methods:
        cells = [show(of_pairs(one, group, "auroc"), 1) for group in groups]
        cells += [show(of_sets(one, sets, "nll"), 3), calibration_error(one, sets)]
        mark = "**" if "ours" in one.name else ""
        rows.append([f"{mark}{label(one.name)}{mark}", *cells])
    return table(["", *(f"AUROC {inside}" for inside in sets), "AUROC, all", "NLL", "ECE"], rows)


def label(name: str) -> str:
    """In words that need no other part of the page."""
    return LABELS.get(name, name)


def _verdicts(images: Sequence[ImageResults]) -> Iterable[str]:
    words = {True: "passes", False: "does not pass", None: "neither passes nor fails yet, as runs are unfinished"}
    found = [one for kind in bar.KINDS if (one := bar.verdict(kind, images))]
    if found:
        listed = "; ".join(f"{label(one.kind.ours)} {words[one.passed]}" for one in found)
        yield (
            "The bar that our default is held to: the highest mean AUROC of all, nowhere more than one point below the "
            f"best, lower NLL and ECE than without it. **Today {listed}**; point by point below."
        )


def _picture(methods: Sequence[Compared], images: Sequence[ImageResults]) -> Drawing:
    pairs = pairs_of(images)
    colours = dict(zip((found.settings["inside"] for found in images), SETS, strict=False))

    def draw() -> Figure:
        figure = Figure(figsize=(8.0, 1.4 + 0.36 * len(methods)))
        axes = figure.subplots()
        for height, one in enumerate(reversed(methods)):
            axes.axhline(height, color=GREY, lw=0.4, alpha=0.4)
            for inside, colour in colours.items():
                own = [value for pair in pairs if pair.inside == inside for value in _at(one, pair)]
                axes.plot(own, [height] * len(own), "o", color=colour, ms=5, alpha=0.75, mew=0)
            if (mean := of_pairs(one, pairs, "auroc")) is not None:
                axes.plot(mean.mean, height, "D", color=BLACK, ms=7, mfc="none", mew=1.4)
        axes.set_yticks(range(len(methods)), [label(one.name) for one in reversed(methods)])
        for tick, one in zip(axes.get_yticklabels(), reversed(methods), strict=True):
            if "ours" in one.name:
                tick.set(color=BLUE, fontweight="bold")
        for inside, colour in colours.items():
            axes.plot([], [], "o", color=colour, ms=5, label=f"{inside} against one other set")
        axes.plot([], [], "D", color=BLACK, ms=7, mfc="none", mew=1.4, label="mean over all pairs")
        axes.set(xlabel="AUROC, per cent", xlim=(None, 100.5), ylim=(-0.6, len(methods) - 0.4))
        figure.legend(loc="outside lower center", ncol=2, fontsize=8)
        return figure

    return Drawing(
        "opening",
        "How well each method tells images of other kinds from those it knows: one dot for each pair of sets, farther "
        "right is better, our rows in blue. Rows without a diamond were not measured on all pairs.",
        draw,
    )


def _at(method: Compared, pair: Pair) -> list[float]:
    found = list(method.detection(pair, "auroc").values())
    return [spread(found).mean] if found else []
