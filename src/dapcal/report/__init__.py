"""A report about a calibrated posterior: one HTML file for a person, which needs nothing outside itself.

Subject ──► examples and predictions ──► questions/: what is measured, then shown ──► page
"""

from __future__ import annotations

from pathlib import Path

from dapcal.files import write_text
from dapcal.models.columns import Unit
from dapcal.models.subject import Axis, Picture, Row, Subject
from dapcal.report.examples import gather
from dapcal.report.page import page

__all__ = ["Axis", "Picture", "Row", "Subject", "Unit", "write"]


def write(subject: Subject, path: str | Path) -> None:
    """Write the report, complete or not at all; its size is bounded whatever the size of the data."""
    write_text(path, page(gather(subject)))
