"""Text as a terminal may show it: names and values of others cannot move its cursor, hide lines or reverse them."""

from __future__ import annotations

import re

# C0 but for tab and line feed, DEL and C1, marks that change the direction of text, halves of a character (as Python
# has them in names of files that are not UTF-8)
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LONG = re.compile(r"([^\s/`'\",;]{60})[^\s/`'\",;]{196,}")  # longer than names of files may be, so none of them

_LONGEST = 60  # characters of a name that somebody made up


def shown(text: str) -> str:
    r"""Control characters as escapes that can be read; tabs and line feeds stay.

    >>> shown("\x1b[31mred\x9b")
    '\\x1b[31mred\\x9b'
    """
    return _INVISIBLE.sub(lambda found: _escaped(ord(found[0])), text)


def in_json(text: str) -> str:
    r"""The same within JSON, whose escapes keep what they stand for.

    >>> in_json('"\x9b"')
    '"\\u009b"'
    """
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """White space of any kind as single spaces, control characters as escapes, and words of any length cut.

    >>> one_line(f"no column `{1000 * 'a'}`") == f"no column `{60 * 'a'}…`"
    True
    """
    return shown(_LONG.sub(r"\1…", " ".join(text.split())))


def brief(name: str) -> str:
    """A name, a label or a cell in one line, of which the beginning is enough.

    >>> brief(1000 * "a") == f"{60 * 'a'}…"
    True
    """
    line = " ".join(name.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
