"""Amounts as people write them."""

from __future__ import annotations

import math


def amount(value: float, digits: int = 4) -> str:
    """A few significant digits, thousands apart from 10,000 on; powers of ten only where nobody would count the zeros.

    >>> amount(171234.56), amount(2009.0), amount(0.012345), amount(-3.0), amount(2.5e-9)
    ('171,235', '2009', '0.01235', '-3', '2.5e-09')
    """
    if not math.isfinite(value) or value == 0:
        return f"{value + 0.0:g}"
    power = math.floor(math.log10(abs(value)))
    if not -5 < power < 12:
        return f"{value:.{digits}g}"
    decimals = max(0, digits - 1 - power)
    text = f"{value:,.{decimals}f}" if power > 3 else f"{value:.{decimals}f}"  # a year has no comma
    return text.rstrip("0").rstrip(".") if "." in text else text
