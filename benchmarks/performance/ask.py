"""One question, asked in this process: its rows as JSON, on the last line that is printed.

Run: PYTHONPATH=benchmarks python -m performance.ask laplace 5 [small]
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings

from dapcal import DapcalWarning
from dapcal.experiments.performance import Row, spread, to_plain


def main(name: str, repeats: str, small: str = "") -> None:
    warnings.simplefilter("ignore", DapcalWarning)  # made-up data are warned of, and rightly
    question = importlib.import_module(f"performance.{name}")
    found = {part: getattr(question, part)(int(repeats), bool(small)) for part in question.__all__}
    for row in found.get("rows", ()):
        print(shown(row), file=sys.stderr)
    print(json.dumps({part: [to_plain(one) for one in own] for part, own in found.items()}))


def shown(row: Row) -> str:
    ours = f"  {row.name}: {spread(row.ours).median:.4g} {row.unit}"
    if row.ratio is None:
        return ours
    ratio = f"{row.ratio.median:.2f} ({row.ratio.least:.2f} to {row.ratio.most:.2f})"
    return f"{ours}, {ratio} times {row.peer} ({spread(row.theirs).median:.4g})"


if __name__ == "__main__":
    main(*sys.argv[1:])
