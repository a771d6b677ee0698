"""Texts that spell dates: by numbers in three orders, or with the name of a month, and with a time or without one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dapcal.tables.values import without_words

Order = Literal["year", "day", "month"]
"""What a date of numbers begins with: 2024-12-31, 31.12.2024 (also 31/12/2024, 31-12-2024), or 12/31/2024."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EXAMPLES: dict[Order, str] = {"year": "2024-12-31", "day": "31/12/2024", "month": "12/31/2024"}

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_NAME = (
    r"(?P<name>(?i:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?))\.?"
)
_WEEKDAY = r"(?:(?i:mon|tue|tues|wed|thu|thur|thurs|fri|sat|sun|(?:mon|tues|wednes|thurs|fri|satur|sun)day)\.?,? )?"
_CLOCK = r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2})(?:[.,]\d+)?)?(?: ?(?P<half>[AaPp])\.?[Mm]\.?)?"
_TIME = rf"(?:(?:T|,? (?:at )?){_CLOCK}(?: ?(?P<zone>Z|UTC|GMT|[+-]\d{{2}}:?\d{{2}}))?)?"
_DAY = r"(?P<day>\d{1,2})(?i:st|nd|rd|th)?"
_YEAR_FIRST = r"(?P<year>\d{4})[-/.](?P<month>\d{1,2})[-/.](?P<day>\d{1,2})"
_YEAR_LAST = r"(?P<one>\d{1,2})(?:[./](?P<two>\d{1,2})[./](?P<last>\d{4}|\d{2})|-(?P<dashed>\d{1,2})-(?P<full>\d{4}))"
_NAMED = (
    rf"{_DAY}[- /.]? ?(?:of )?{_NAME}[- /.,]? ?(?P<year>\d{{4}}|\d{{2}})",  # 3 Mar 2021, 3rd of March, 2021, 03-MAR-21
    rf"{_NAME}[- /.]? ?{_DAY}[- /,] ?(?P<year>\d{{4}})",  # March 3, 2021
    rf"(?P<year>\d{{4}})[- /.]? ?{_NAME}[- /.] ?{_DAY}",  # 2021-Mar-03
)
_PATTERNS = tuple(rf"^{_WEEKDAY}{pattern}{_TIME}$" for pattern in (_YEAR_FIRST, _YEAR_LAST, *_NAMED))
_TEXTS = tuple(re.compile(pattern, re.ASCII) for pattern in _PATTERNS)
_TIME_ALONE = rf"^{_CLOCK}$"


def are_dates(text: pa.ChunkedArray) -> bool:
    """Whether texts are mostly dates or times, beside those that stand for a missing one."""
    return _share(text, *_PATTERNS, _TIME_ALONE) > 0.9


def are_times(text: pa.ChunkedArray) -> bool:
    """Whether times of the day without a date are among them."""
    return _share(text, _TIME_ALONE) > 0.1


def parsed(text: str, order: Order) -> float | None:
    """Days since 1970; None of what is not a date of that order. The name of a month leaves no doubt about it."""
    match = next((match for match in (pattern.match(text) for pattern in _TEXTS) if match), None)
    if match is None:
        return None
    part = match.groupdict()
    if "one" in part:
        if order == "year":
            return None
        two, year = part["two"] or part["dashed"], part["last"] or part["full"]
        day, month = (part["one"], two) if order == "day" else (two, part["one"])
    elif "name" in part:
        day, month, year = part["day"], str(1 + _MONTHS.index(part["name"][:3].lower())), part["year"]
    elif order != "year":
        return None
    else:
        day, month, year = part["day"], part["month"], part["year"]
    hour, minute, second = (int(part[name] or 0) for name in ("hour", "minute", "second"))
    if part["half"] is not None:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + 12 * (part["half"] in "Pp")
    try:
        moment = datetime(_century(year), int(month), int(day), hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
    zone = part["zone"]
    if zone not in (None, "Z", "UTC", "GMT"):
        offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
        moment += offset if zone[0] == "-" else -offset
    return (moment - EPOCH) / timedelta(days=1)


def order_of(present: Sequence[str], name: str) -> tuple[Order, str | None]:
    """What dates begin with, decided by days over 12, and by points; a note where they could be meant another way."""
    found = [match for match in map(_TEXTS[1].match, present) if match is not None]
    if not found or sum(bool(_TEXTS[0].match(text)) for text in present) > len(found):
        return "year", None
    first = any(int(match["one"]) > 12 for match in found)
    second = any(int(match["two"] or match["dashed"]) > 12 for match in found)
    if first and second:
        raise ValueError(f"Column `{name}` holds dates with day and month in two orders; write them as 2024-12-31")
    if second:
        return "month", None
    if first or found[0].string[found[0].end("one")] == ".":
        return "day", None
    return "day", "no day is over 12, so they are taken as day/month; write them as 2024-12-31 if that is wrong"


def _century(year: str) -> int:
    return int(year) if len(year) == 4 else int(year) + (1900 if year >= "70" else 2000)


def _share(text: pa.ChunkedArray, *patterns: str) -> float:
    """Of the texts that are not missing, how many match one of the patterns."""
    present = without_words(text).drop_null()
    if not len(present):
        return 0.0
    found = [pc.match_substring_regex(present, pattern).to_numpy() for pattern in patterns]
    return float(np.logical_or.reduce(found).mean())
