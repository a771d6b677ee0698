"""How good is it on the new data? Where these have the target, beside the best answer that looks at no column."""

from __future__ import annotations

from dapcal.report.examples import Examples
from dapcal.report.kit.markup import cut, paragraph, table


def section(examples: Examples) -> str:
    """The table; empty where the new data have no target."""
    subject = examples.subject
    if subject.judged is None:
        return ""
    trivial = "the most frequent class" if subject.is_classification else "the mean of the training rows"
    lead = f"The new data hold {cut(subject.target)} as well, so predictions can be compared with it."
    rows = [(cut(what, 60), value, other) for what, value, other in subject.judged.table]
    return paragraph(lead) + table(f"Quality on {cut(subject.new_name)}", ("", "model", f"always {trivial}"), rows)
