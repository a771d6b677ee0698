"""Encoders and targets from the JSON that describes them in a saved model; whatever is not exactly that is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from dapcal.tables.columns import Category, Number
from dapcal.tables.date_texts import Order
from dapcal.tables.dates import Date
from dapcal.tables.encoder import Encoder
from dapcal.tables.magnitudes import Magnitude
from dapcal.tables.targets import Classes, Numbers


def encoder_from_json(description: Mapping[str, Any]) -> Encoder:
    """The encoder that `Encoder.as_json` described; anything else is refused."""
    _expect(isinstance(description, Mapping), "no object")
    _expect(set(description) == {"target", "dropped", "notes", "columns"}, f"its fields are {sorted(description)}")
    _expect(isinstance(description["target"], str), "its target has no name")
    _expect(isinstance(description["columns"], list) and bool(description["columns"]), "it has no columns")
    encoder = Encoder(
        columns=tuple(_column(column) for column in description["columns"]),
        target=description["target"],
        dropped=_strings(description["dropped"], "dropped"),
        notes=_strings(description["notes"], "notes"),
    )
    names = [column.name for column in encoder.columns]
    _expect(len({*names, encoder.target}) == len(names) + 1, "a column occurs twice")
    return encoder


def target_from_json(description: Mapping[str, Any]) -> Classes | Numbers:
    """The target that `as_json` described; anything else is refused."""
    if isinstance(description, Mapping):
        fields = set(description) - {"smearing"}  # of logarithms alone
        if fields == {"kind", "center", "scale"} and description["kind"] == "numbers":
            center, scale = (_finite(description[name], name) for name in ("center", "scale"))
            smearing = _finite(description["smearing"], "smearing") if "smearing" in description else None
            if scale > 0 and (smearing is None or smearing > 0):
                return Numbers(center, scale, smearing)
        if set(description) == {"kind", "labels", "original"} and description["kind"] == "classes":
            labels, original = description["labels"], description["original"]
            if (
                isinstance(labels, list)
                and all(isinstance(label, str) for label in labels)
                and len(set(labels)) == len(labels) >= 2
                and original in ("text", "number", "boolean")
            ):
                return Classes(tuple(labels), original)
    raise ValueError("The description of the target is damaged; fit and save the model again")


_FIELDS = {
    "number": {"center", "scale"},
    "category": {"levels", "rare"},
    "date": {"center", "scale", "order", "has_times"},
}


def _column(description: Any) -> Number | Category | Date:
    _expect(isinstance(description, Mapping), "a column is not an object")
    kind = description.get("kind")
    _expect(isinstance(kind, str) and kind in _FIELDS, f"a column is of kind {kind!r}")
    fields = _FIELDS[kind]
    found = set(description) - {
        "marked",
        *({"category": ["open", "codes"], "number": ["magnitude"]}.get(kind, [])),
    }  # which earlier files do not have
    _expect(found == {"kind", "name", "missing", *fields}, f"a column has the fields {sorted(description)}")
    name, missing = description["name"], description["missing"]
    marked = description.get("marked", missing)
    _expect(isinstance(name, str) and isinstance(missing, bool), "a column has no name")
    _expect(isinstance(marked, bool) and marked >= missing, f"column `{name}` has no place for missing values")
    if kind != "category":
        center, scale = (_finite(description[field], name) for field in ("center", "scale"))
        _expect(scale > 0, f"column `{name}` has scale {scale}")
        if kind == "date":
            order, has_times = description["order"], description["has_times"]
            _expect(order in get_args(Order) and isinstance(has_times, bool), f"column `{name}` has no order")
            return Date(name, center, scale, missing, order, has_times)
        return Number(name, center, scale, missing, marked, _magnitude(description.get("magnitude"), name))
    levels, rare = _strings(description["levels"], name), _strings(description["rare"], name)
    _expect(len({*levels, *rare}) == len(levels) + len(rare) > 0, f"column `{name}` has a level twice, or none")
    is_open = description.get("open", False)
    _expect(isinstance(is_open, bool) and len(rare) >= is_open, f"column `{name}` has no place for new levels")
    return Category(
        name, levels, rare, missing, marked, is_open, _codes(description.get("codes", []), name, levels, rare)
    )


def _magnitude(description: Any, name: str) -> Magnitude | None:
    if description is None:
        return None
    trouble = f"column `{name}` has no magnitude"
    _expect(isinstance(description, Mapping) and set(description) == {"unit", "center", "scale"}, trouble)
    found = Magnitude(**{field: _finite(description[field], name) for field in ("unit", "center", "scale")})
    _expect(found.unit > 0 and found.scale > 0, trouble)
    return found


def _codes(values: Any, name: str, levels: tuple[str, ...], rare: tuple[str, ...]) -> tuple[tuple[float, ...], ...]:
    """A few finite numbers for every level, or none at all."""
    trouble = f"column `{name}` has no code for every level"
    _expect(isinstance(values, list) and all(isinstance(code, list) for code in values), trouble)
    _expect(not values or len(values) == len(levels) + len(rare), trouble)
    _expect(len({len(code) for code in values}) <= 1, trouble)
    numbers = [value for code in values for value in code]
    _expect(all(isinstance(value, float) and math.isfinite(value) for value in numbers), trouble)
    return tuple(tuple(code) for code in values)


def _finite(value: Any, name: str) -> float:
    """A finite number from the hexadecimal text that keeps it exact."""
    try:
        number = float.fromhex(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    _expect(math.isfinite(number), f"`{name}` holds {value!r}")
    return number


def _strings(values: Any, name: str) -> tuple[str, ...]:
    _expect(isinstance(values, list) and all(isinstance(value, str) for value in values), f"`{name}` holds no texts")
    return tuple(values)


def _expect(fine: bool, trouble: str) -> None:
    if not fine:
        raise ValueError(f"The description of the table's columns is damaged ({trouble}); fit and save the model again")
