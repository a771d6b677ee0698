"""A column of dates as the inputs of a network: how late, and where in the year, the week and the day."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from dapcal.tables.columns import LIMIT, Counts
from dapcal.tables.date_texts import EPOCH, EXAMPLES, Order, order_of, parsed
from dapcal.tables.values import is_text, short, texts, without_words, words_note

_DAY, _WEEK, _YEAR = 1.0, 7.0, 365.2425


@dataclass(frozen=True)
class Date:
    """(days − center)/scale, a 0/1 column for missing ones, and sine and cosine of the year, the week and the day.

    Attributes:
        name: of the column.
        center: mean of the training rows, in days since 1970.
        scale: their standard deviation.
        missing: whether training rows had missing values.
        order: what texts begin with.
        has_times: whether training rows had times of the day.
    """

    name: str
    center: float
    scale: float
    missing: bool
    order: Order
    has_times: bool

    marked = True

    @property
    def width(self) -> int:
        """Columns of the encoded matrix."""
        return 6 + 2 * self.has_times

    def encode(self, values: pa.ChunkedArray, part: np.ndarray, first_row: int) -> Counts:
        """Fill `part` (N, width), which holds zeros."""
        days = days_of(values, self.name, self.order, first_row)
        missing = np.isnan(days)
        standardised = (days - self.center) / self.scale
        if (np.abs(standardised) > LIMIT).any():
            row = int(np.argmax(np.abs(standardised) > LIMIT))
            raise ValueError(
                f"Row {first_row + row}: column `{self.name}` lies too far from the training rows; correct it"
            )
        part[:, 0] = np.where(missing, 0.0, standardised)
        part[:, 1] = missing
        for place, period in enumerate((_YEAR, _WEEK, _DAY)[: 2 + self.has_times]):
            angle = 2 * math.pi * days / period
            part[:, 2 + 2 * place] = np.where(missing, 0.0, np.sin(angle))
            part[:, 3 + 2 * place] = np.where(missing, 0.0, np.cos(angle))
        return Counts(0 if self.missing else int(missing.sum()), Counter())

    def decode(self, part: np.ndarray) -> list[str]:
        """Readable dates of encoded rows (N, width)."""
        return [
            "missing" if mark > 0.5 else self.shown(value)
            for value, mark in zip(part[:, 0].tolist(), part[:, 1].tolist(), strict=True)
        ]

    def shown(self, value: float) -> str:
        """A date as people write it, from its standardised number, as exactly as float32 keeps it."""
        days = self.center + self.scale * value
        try:
            moment = EPOCH + timedelta(days=days if self.has_times else round(days))
        except OverflowError:
            return f"{days:,.0f} days after 1970"
        return f"{moment:%Y-%m-%d %H:%M}" if self.has_times else f"{moment:%Y-%m-%d}"

    def as_json(self) -> dict[str, Any]:
        """A description that `dapcal.tables.descriptions` reads back exactly."""
        return {"kind": "date", **asdict(self), "center": self.center.hex(), "scale": self.scale.hex()}


def fit_date(values: pa.ChunkedArray, name: str) -> tuple[Date, str | None]:
    """Learn a column of dates; notes on words read as missing, and where day and month could be exchanged."""
    order: Order = "year"
    notes: tuple[str | None, ...] = ()
    if is_text(values.type):
        text = texts(values, name)
        order, note = order_of(without_words(text).drop_null().to_pylist(), name)
        notes = (note, words_note(values, name))
    days = days_of(values, name, order)
    present = days[~np.isnan(days)]
    deviation = float(present.std())
    last = (EPOCH + timedelta(days=float(present.max()))).date()
    told = f"column `{name}` is read as dates; rows after {last}, the last of them, will count as unusual"
    has_times = bool((present != np.floor(present)).any())
    fitted = Date(name, float(present.mean()), deviation or 1.0, len(present) < len(days), order, has_times)
    return fitted, "; ".join([told, *filter(None, notes)])


def days_of(values: pa.ChunkedArray, name: str, order: Order, first_row: int = 1) -> np.ndarray:
    """Days since 1970, NaN where missing; what is not a date is refused by its row."""
    if pa.types.is_temporal(values.type):
        seconds = values.cast(pa.timestamp("s"), safe=False).cast(pa.int64())
        return seconds.cast(pa.float64()).to_numpy() / 86_400
    known: dict[str | None, float] = {None: math.nan}
    found = np.empty(len(values))
    for row, text in enumerate(without_words(texts(values, name)).to_pylist()):
        if text not in known:
            days = parsed(text, order)
            if days is None:
                raise ValueError(
                    f"Row {first_row + row}: column `{name}` holds {short(text)}, which is not a date such as "
                    f"{EXAMPLES[order]}; correct it, or leave it empty if it is missing"
                )
            known[text] = days
        found[row] = known[text]
    return found
