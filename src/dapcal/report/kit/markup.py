"""Pieces of HTML: elements, sections, tables, lists, and figures with captions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

_BEFORE_OR_AFTER_A_SIGN = re.compile(r" (?=[%≤×±=])|(?<=[≤×±=]) ")


class Captioned(NamedTuple):
    """A chart (markup), its name and what to see in it (words)."""

    chart: str
    name: str
    words: str


def tag(name: str, content: str = "", **attributes: str | float) -> str:
    """An element; `content` is markup, attributes are escaped (class_ and aria_label lose or change their _)."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_attribute(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>"


def text(words: str) -> str:
    """Escaped text, whose signs stay on the line of their numbers."""
    return escape(_BEFORE_OR_AFTER_A_SIGN.sub("\u00a0", words))


def cut(words: str, most: int = 60) -> str:
    """Long words end in an ellipsis.

    >>> cut("short"), cut("a long name", 6)
    ('short', 'a lon…')
    """
    return words if len(words) <= most else f"{words[: most - 1]}…"


def paragraph(words: str, class_: str = "plain") -> str:
    """A paragraph of text."""
    return tag("p", text(words), class_=class_)


def section(name: str, heading: str, content: str) -> str:
    """A section of the page, with its heading."""
    title = tag("h2", text(heading), id=f"{name}-heading")
    return tag("section", title + content, id=name, aria_labelledby=f"{name}-heading")


def figures(drawn: Iterable[Captioned]) -> str:
    """Charts side by side where there is room."""
    each = [
        tag("figure", chart + tag("figcaption", tag("strong", text(f"{name}. ")) + text(words)))
        for chart, name, words in drawn
    ]
    return tag("div", "".join(each), class_="figures")


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """CSS classes and the names of what is drawn in them."""
    items = "".join(tag("li", text(name), class_=class_) for class_, name in entries)
    return tag("ul", items, class_="legend", aria_label="Legend")


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text whose first column names the rows; no heads, no head."""
    body = "".join(tag("tr", tag("th", text(row[0]), scope="row") + cells(row[1:])) for row in rows)
    return scrolling(caption, heads, body)


def scrolling(caption: str, heads: Sequence[str], body: str, class_: str = "numbers") -> str:
    """A table in a box of its own that scrolls, by keyboard as well."""
    named = "".join(tag("th", text(head), scope="col") if head else "<td></td>" for head in heads)
    top = tag("thead", tag("tr", named)) if heads else ""
    whole = tag("table", tag("caption", text(caption)) + top + tag("tbody", body), class_=class_)
    return tag("div", whole, class_="scroll", role="region", tabindex="0", aria_label=caption)


def cells(values: Iterable[str]) -> str:
    """Cells of a table's row."""
    return "".join(tag("td", text(value)) for value in values)


def items(words: Iterable[str]) -> str:
    """A list of text."""
    return tag("ul", "".join(tag("li", text(each)) for each in words), class_="plain")


def _attribute(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
