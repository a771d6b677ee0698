"""Which columns are not what they were? Those of new data that differ as a whole from the training rows."""

from __future__ import annotations

from dapcal.report.examples import Examples
from dapcal.report.kit.markup import cells, cut, paragraph, scrolling, tag, text
from dapcal.report.kit.numbers import percent

_MOST = 20


def section(examples: Examples) -> str:
    """A line a column; empty without new data of a table."""
    subject = examples.subject
    if subject.new is None or subject.unusual is None:
        return ""
    if not subject.drifts:
        return paragraph(
            "No column of the new data differs as a whole from the training rows, beyond what chance does."
        )
    lead = (
        "Columns whose values as a whole differ from those of the training rows. Of data like the training rows, one "
        "file in twenty would have any such column, however many columns there are (Holm’s procedure)."
    )
    body = "".join(
        tag("tr", tag("th", text(cut(one.column)), scope="row") + cells([one.what, percent(one.difference)]))
        for one in subject.drifts[:_MOST]
    )
    hidden = len(subject.drifts) - _MOST
    caption = "Columns, the largest difference first" + (f"; {hidden} more are not shown" if hidden > 0 else "")
    return paragraph(lead) + scrolling(caption, ["column", "what differs", "by"], body, "drift")
