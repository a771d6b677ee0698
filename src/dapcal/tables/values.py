"""Values of a column as numbers or texts, by the same rules whatever file they come from.

White space around texts is dropped, `MISSING` lists how a missing value is spelt, and true and false count in any case.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Kind = Literal["number", "category", "date"]
"""What a column holds: numbers become float64, categories become texts, dates stay as they are."""

MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NAN", "null", "NULL", "None", "-", "?")
"""Texts that stand for a missing value."""

WORDS = (
    *(
        "unknown",
        "unk",
        "none",
        "missing",
        "undefined",
        "blank",
        "empty",
        "pending",
        "tbd",
        "tba",
        "nil",
        "null",
        "nan",
    ),
    *("na", "n/a", "n.a.", "n.a", "n/d", "nat", "not available", "not known", "not applicable", "\\n"),
    *("-", "--", "---", "\u2013", "\u2014", ".", "..", "...", "?", "??", "???", "*"),  # also the longer dashes
    *("#n/a", "#value!", "#ref!", "#div/0!", "#num!", "#name?", "#null!"),
)
"""Texts, in any case, that stand for a missing value among numbers and dates; elsewhere they may be levels."""

_NUMBER = r"^[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|(?i:inf(inity)?))$"
_NUMBER_WITH_COMMA = r"^[+-]?[0-9][0-9.]*,[0-9][0-9.,]*$"
_SPACES = " '\u00a0\u202f"  # between thousands, beside commas and points
_GROUPS = rf"[0-9]{{1,3}}([{_SPACES}][0-9]{{3}})+([.,][0-9]+)?"
_DIGITS = rf"[0-9][0-9.,{_SPACES}]*"
_DRESSED = rf"^\(?[+-]?({_GROUPS}|[$€£¥] ?[+-]?{_DIGITS}|{_DIGITS}[%$€£¥])\)?$"  # 12 500, $1,200.50, 7 %, ($3)
_WITH_UNIT = r"^[+-]?[0-9][0-9.,]* ?[A-Za-zµ°][A-Za-zµ°²³/]*$"  # 1.2 km
_TELLS_NOTHING = ("", "na", "n/a", "nan", "null", "<na>", "#n/a")  # of spellings of a missing value
_PLAINLY = "write them with a decimal point, and no separators of thousands or signs"
_MOSTLY = 0.9  # above this share of numbers, other texts in a column are mistakes, and not levels of a category


class Guess(NamedTuple):
    """What a column of texts seems to hold."""

    values: pa.ChunkedArray
    note: str | None  # what there is to say about it


def numbers(column: pa.ChunkedArray, name: str, source: str = "", first_row: int = 1) -> np.ndarray:
    """A column as float64, NaN where missing; texts that are not numbers are refused, and infinities too."""
    column = _plain(column)
    kind = column.type
    if is_text(kind):
        try:
            values = _parsed(column)
        except pa.ArrowInvalid as error:
            column = without_words(texts(column, name))
            row = int(np.argmin(are_numbers(column)))
            raise ValueError(_no_number(column, row, name, source, first_row, "number")) from error
    elif is_number(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        # safe in Arrow's sense would refuse integers beyond 2⁵³
        values = column.cast(pa.float64(), safe=False).to_numpy()
    else:
        raise ValueError(f"{_in(source)}Expected numbers in column `{name}`, got {kind}; make numbers of it")
    return _finite(values, column, name, source, first_row)


def texts(column: pa.ChunkedArray, name: str, source: str = "") -> pa.ChunkedArray:
    """A column as texts, null where missing, spelt alike whatever the file: 1.0 as "1", True as "true"."""
    column = _plain(column)
    kind = column.type
    if not (is_text(kind) or is_number(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)):
        raise ValueError(f"{_in(source)}Expected texts in column `{name}`, got {kind}; make texts of it")
    text = pc.utf8_trim_whitespace(_spelt(column))
    text = pc.if_else(pc.is_in(text, pa.array(MISSING)), pa.scalar(None, pa.string()), text)
    capitals = pc.is_in(text, pa.array(["True", "TRUE", "False", "FALSE"]))
    return pc.if_else(capitals, pc.utf8_lower(text), text) if pc.any(capitals).as_py() else text


def without_words(text: pa.ChunkedArray) -> pa.ChunkedArray:
    """What `texts` gives, null also where a word stands for a missing number or date."""
    words = pc.is_in(pc.utf8_lower(text), pa.array(WORDS))
    return pc.if_else(words, pa.scalar(None, pa.string()), text)


def words_note(column: pa.ChunkedArray, name: str) -> str | None:
    """A note on spellings of a missing value that may have meant something else."""
    text = pc.utf8_trim_whitespace(_plain(column).cast(pa.string()))
    words = pc.is_in(pc.utf8_lower(text), pa.array([word for word in WORDS if word not in _TELLS_NOTHING]))
    found = sorted(pc.value_counts(text.filter(words)).to_pylist(), key=lambda own: (-own["counts"], own["values"]))
    if not found:
        return None
    rows = sum(own["counts"] for own in found)
    told = ", ".join(short(own["values"]) for own in found[:3]) + (", …" if len(found) > 3 else "")
    return f"column `{name}`: {told} taken as missing ({rows:,} {'row' if rows == 1 else 'rows'})"


def converted(column: pa.ChunkedArray, kind: Kind, name: str, source: str, first_row: int) -> pa.ChunkedArray:
    """A column as what it is expected to hold."""
    if kind == "number":
        return _nullable(numbers(column, name, source, first_row))
    return column if kind == "date" and pa.types.is_temporal(column.type) else texts(column, name, source)


def guessed(column: pa.ChunkedArray, name: str, source: str) -> Guess:
    """Numbers if all texts are; what looks like numbers that a few texts have spoilt is refused."""
    with suppress(pa.ArrowInvalid):
        values = _nullable(_finite(_parsed(column), column, name, source, 1))
        if values.null_count < len(values):
            return Guess(values, words_note(column, name))
    text = texts(column, name)
    present = without_words(text).drop_null()
    if not len(present):  # words alone are levels
        return Guess(text if text.null_count < len(text) else values, None)
    plain, commas = are_numbers(present), _matches(present, _NUMBER_WITH_COMMA)
    dressed = commas | _matches(present, _DRESSED)
    share = plain.mean()
    # a few levels such as 0, 1, 2, 3+ are a category
    many = pc.count_distinct(present).as_py() > min(20, len(present) / 2)
    if commas.mean() > _MOSTLY or (many and share <= _MOSTLY < (plain | dressed).mean()):
        first = int(np.argmax(dressed))
        raise ValueError(
            f"{source}: column `{name}` holds numbers with {'commas' if commas[first] else 'signs or spaces'} "
            f"({short(present[first].as_py())}); {_PLAINLY} (or --drop the column)"
        )
    if many and _matches(present, _WITH_UNIT).all() and pc.count_distinct(_unit(present)).as_py() == 1:
        raise ValueError(
            f"{source}: column `{name}` holds numbers with a unit ({short(present[0].as_py())}); write the numbers "
            "alone (or --drop the column, or name it with --category)"
        )
    if many and share > _MOSTLY:
        text = without_words(text)
        row = int(np.argmin(are_numbers(text)))
        raise ValueError(_no_number(text, row, name, source, 1, f"number ({100 * share:.4g} % of the column are)"))
    return Guess(text, None)


def is_text(kind: pa.DataType) -> bool:
    """Whether a type holds texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def is_number(kind: pa.DataType) -> bool:
    """Whether a type holds integers, floats or decimals."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def are_numbers(text: pa.ChunkedArray) -> np.ndarray:
    """Where a text spells a number, or is missing."""
    return _matches(text, _NUMBER)


def at(source: str, row: int) -> str:
    """Where an error lies, for its first words."""
    return f"{source}, row {row}" if source else f"Row {row}"


def short(value: object) -> str:
    """A value as errors quote it."""
    text = str(value)
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _finite(values: np.ndarray, column: pa.ChunkedArray, name: str, source: str, first_row: int) -> np.ndarray:
    infinite = np.isinf(values)
    if infinite.any():
        row = int(np.argmax(infinite))
        raise ValueError(_no_number(column, row, name, source, first_row, "finite number"))
    return values


def _no_number(column: pa.ChunkedArray, row: int, name: str, source: str, first_row: int, what: str) -> str:
    value = column[row].as_py()
    dressed = any(re.match(pattern, str(value)) for pattern in (_NUMBER_WITH_COMMA, _DRESSED))
    advice = _PLAINLY.replace("them", "it") if dressed else "correct it, or leave it empty if it is missing"
    return f"{at(source, first_row + row)}: column `{name}` holds {short(value)}, which is not a {what}; {advice}"


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _parsed(text: pa.ChunkedArray) -> np.ndarray:
    for plain in (lambda: text, lambda: texts(text, "")):  # the first is quick, where nothing is missing or padded
        with suppress(pa.ArrowInvalid):
            return plain().cast(pa.float64()).to_numpy()
    return without_words(texts(text, "")).cast(pa.float64()).to_numpy()


def _spelt(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """As texts; Arrow would write 123456789012.0 as 1.23456789012e+11."""
    if not (pa.types.is_floating(column.type) or pa.types.is_decimal(column.type)):
        return column.cast(pa.string())
    values = column.cast(pa.float64())
    whole = pc.and_(pc.equal(values, pc.round(values)), pc.less(pc.abs(values), 2.0**53))
    integers = pc.if_else(whole, values, 0.0).cast(pa.int64())
    return pc.if_else(whole, integers.cast(pa.string()), values.cast(pa.string()))


def _nullable(values: np.ndarray) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, from_pandas=True)])


def _matches(text: pa.ChunkedArray, pattern: str) -> np.ndarray:
    """Where a text matches; a missing one matches everything."""
    return pc.fill_null(pc.match_substring_regex(text, pattern), True).to_numpy()


def _unit(text: pa.ChunkedArray) -> pa.ChunkedArray:
    """What follows a number."""
    return pc.replace_substring_regex(text, r"^[+-]?[0-9.,]* ?", "")


def _in(source: str) -> str:
    return f"{source}: " if source else ""
