"""Critical-difference diagrams of the results page: average ranks, and who cannot be told apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.figure import Figure

from dapcal.experiments.page.cells import decimal, table
from dapcal.experiments.page.drawings import BLACK, Drawing
from dapcal.experiments.page.files import ImageResults
from dapcal.experiments.page.pairs import methods_of, pairs_of
from dapcal.experiments.page.ranks import ALPHA, Ranks, compared
from dapcal.experiments.page.summary import KINDS
from dapcal.experiments.plots import BLUE, GREY

NAMES = {False: "one-network", True: "ensembles"}


def section(images: Sequence[ImageResults]) -> Iterable[str | Drawing]:
    """The diagram and its numbers, of one-network methods and of ensembles."""
    pairs, methods = pairs_of(images), methods_of(images)
    for ensembles, title in KINDS.items():
        own = [method for method in methods if method.ensemble == ensembles]
        if not own:
            continue
        yield f"### {title}: average ranks"
        found = compared(own, pairs)
        left_out = [method.name for method in own if method.missing(pairs)]
        if found is None:
            yield f"Nothing to compare yet: fewer than two have every pair. With a pair missing: {'; '.join(left_out)}."
            continue
        yield diagram(found, NAMES[ensembles])
        yield table(
            ["", "average rank"],
            [[name, decimal(rank, 2)] for name, rank in zip(found.names, found.average, strict=True)],
        )
        yield _words(found) + (f" Left out, with a pair missing: {'; '.join(left_out)}." if left_out else "")


def diagram(ranks: Ranks, name: str) -> Drawing:
    """One line for each method, and a bar beside those that do not differ."""

    def draw() -> Figure:
        count = len(ranks.names)
        figure = Figure(figsize=(8.0, 1.3 + 0.24 * count))
        axes = figure.subplots()
        for place, (method, rank) in enumerate(zip(ranks.names, ranks.average, strict=True)):
            colour = BLUE if "ours" in method else BLACK
            axes.plot([1, rank], [place, place], color=GREY, lw=0.5, alpha=0.5)
            axes.plot(rank, place, "o", color=colour, ms=5)
        beside = max(ranks.average) + 0.03 * count
        for place, (first, last) in enumerate(ranks.cliques):
            across = beside + 0.025 * count * place
            axes.plot([across, across], [first - 0.25, last + 0.25], color=BLACK, lw=2.2, solid_capstyle="butt")
        axes.plot([1, 1 + ranks.critical], [-1.3, -1.3], color=BLACK, lw=1.2, marker="|", ms=7)
        label = f"critical difference {decimal(ranks.critical, 2)}"
        axes.text(1 + ranks.critical + 0.02 * count, -1.3, label, va="center", fontsize=8)
        axes.set_yticks(range(count), ranks.names)
        for label_of, method in zip(axes.get_yticklabels(), ranks.names, strict=True):
            label_of.set_color(BLUE if "ours" in method else BLACK)
        axes.set_xticks([1, *range(5, count + 1, 5)] if count > 5 else range(1, count + 1))
        axes.set(ylim=(count - 0.4, -2.0), xlim=(0.9, None), xlabel=f"average rank over {ranks.blocks} blocks")
        return figure

    return Drawing(
        f"ranks-{name}",
        f"Average ranks by AUROC over {ranks.blocks} blocks (pairs under seeds), the best on top, our rows in blue. "
        "Methods beside the same black bar cannot be told apart: their ranks differ by less than the critical "
        "difference.",
        draw,
    )


def _words(found: Ranks) -> str:
    p_value = "below 0.0001" if found.p_value < 1e-4 else f"{found.p_value:.2g}"
    best = found.names[0]
    like = [
        name for name, rank in zip(found.names[1:], found.average[1:], strict=True)
        if rank - found.average[0] < found.critical
    ]  # fmt: skip
    apart = f"{best} is not told apart from {'; '.join(like)}" if like else f"{best} differs from all others"
    return (
        f"By AUROC of the main scores; a block is a pair under a seed that all of these {len(found.names)} methods "
        f"have ({found.blocks} blocks). That all are alike: p {p_value} (Friedman). Critical difference "
        f"{decimal(found.critical, 2)} (Nemenyi, at {ALPHA:g}): {apart}. Pairs under a seed share networks, so there "
        "are fewer independent blocks than counted, and the true difference that is needed is larger."
    )
