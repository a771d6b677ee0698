"""Numbers as people read them."""

from __future__ import annotations

import math
from typing import NamedTuple

_SIZES = ((1e5, 1.0, ""), (1e8, 1e3, "thousands"), (1e11, 1e6, "millions"), (1e14, 1e9, "billions"))


class Size(NamedTuple):
    """What the numbers of an axis are divided by, and the word for it."""

    divisor: float
    word: str


def number(value: float, digits: int = 3) -> str:
    """A few significant digits, thousands apart, a true minus sign.

    >>> number(1234.56), number(-0.01234), number(2e-7), number(0)
    ('1,235', '−0.0123', '2e−7', '0')
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)))
    if not -5 < power < 9:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        text = f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    else:
        decimals = max(0, digits - 1 - power)
        text = f"{value:,.{decimals}f}"
        if decimals:
            text = text.rstrip("0").rstrip(".")
    return text.replace("-", "−")


def percent(share: float) -> str:
    """A share in per cent, with a decimal where it is near 0 or 100.

    >>> percent(0.934), percent(0.9987), percent(0.004), percent(1)
    ('93 %', '99.9 %', '0.4 %', '100 %')
    """
    if not math.isfinite(share):
        return "–"
    near_end = 0 < share < 0.0195 or 0.9805 < share < 1
    return f"{100 * share:.1f} %" if near_end else f"{100 * share:.0f} %"


def size_of(largest: float) -> Size:
    """In what size numbers up to `largest` are written short.

    >>> size_of(99_000), size_of(755_000), size_of(-2e9)
    (Size(divisor=1.0, word=''), Size(divisor=1000.0, word='thousands'), Size(divisor=1000000.0, word='millions'))
    """
    return next((Size(divisor, word) for limit, divisor, word in _SIZES if abs(largest) < limit), Size(1.0, ""))
