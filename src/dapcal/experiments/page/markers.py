"""What stands between two HTML comments of a page, replaced: the rest of the page is written by hand."""

from __future__ import annotations

TABLE_END = "<!-- end of table -->"


def table_begin(name: str) -> str:
    """The comment before the table of that name; `TABLE_END` comes after it."""
    return f"<!-- table: {name} -->"


def replaced(text: str, begin: str, end: str, content: str) -> str:
    r"""A page with new content, on lines of its own, between a comment and the first `end` after it.

    >>> replaced("a <!-- x --> old <!-- y --> b", "<!-- x -->", "<!-- y -->", "new")
    'a <!-- x -->\nnew\n<!-- y --> b'

    Raises:
        ValueError: where the page has the first comment not once, or the second not after it.
    """
    before, *rest = text.split(begin)
    if len(rest) != 1 or end not in rest[0]:
        raise ValueError(f"Expected {begin} once in the page and {end} after it, got {len(rest)}; mend these comments")
    return f"{before}{begin}\n{content}\n{end}{rest[0].partition(end)[2]}"
