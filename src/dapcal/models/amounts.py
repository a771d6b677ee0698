"""Amounts as people write them."""

from __future__ import annotations

import math


def amount(value: float, digits: int = 4) -> str:
    """A few significant digits, thousands apart; powers of ten only where nobody would count the zeros.

    >>> amount(171234.56), amount(0.012345), amount(-3.0), amount(2.5e-9), amount(12.0)
    ('171,235', '0.01235', '-3', '2.5e-09', '12')
    """
    if not math.isfinite(value) or value == 0:
        return f"{value + 0.0:g}"
    power = math.floor(math.log10(abs(value)))
    if not -5 < power < 12:
        return f"{value:.{digits}g}"
    text = f"{value:,.{max(0, digits - 1 - power)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
