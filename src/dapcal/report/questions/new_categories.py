"""Do its intervals hold in every category of the new data? Coverage category by category, the lowest first."""

from __future__ import annotations

from dapcal.models.judged_rows import FEWEST
from dapcal.records import LEVEL
from dapcal.report.examples import Examples
from dapcal.report.kit.markup import cut, paragraph, table
from dapcal.report.kit.numbers import percent

_SHOWN = 8


def section(examples: Examples) -> str:
    """A few lines; empty without a category that has enough rows."""
    judged = examples.subject.judged
    if judged is None or judged.coverage is None or not judged.by_category:
        return ""
    groups = judged.by_category
    low = sum(group.is_low for group in groups)
    verdict = "none holds fewer than chance explains"
    if low:
        verdict = f"{low:,} hold{'s' if low == 1 else ''} fewer than chance explains: intervals are too narrow there"
    lead = (
        f"{percent(LEVEL)} intervals hold {percent(judged.coverage)} of the true values of all {judged.rows:,} rows. "
        f"Of {len(groups):,} categories with {FEWEST} rows or more, {verdict} (binomial tests, Holm’s procedure)."
    )
    rows = [
        (
            f"{cut(group.column, 30)}: {cut(group.category, 30)}",
            f"{group.rows:,}",
            percent(group.coverage) + (" (too few)" if group.is_low else ""),
        )
        for group in groups[:_SHOWN]
    ]
    hidden = len(groups) - len(rows)
    caption = "Categories, the lowest coverage first" + (f"; {hidden:,} more hold more" if hidden else "")
    return paragraph(lead) + table(caption, ("", "rows", "inside their interval"), rows)
