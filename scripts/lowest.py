"""The lowest versions that pyproject.toml allows of what dapcal runs with, as constraints for pip.

Run: python scripts/lowest.py > lowest.txt
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
TOOLS = ("docs", "test")  # extras of those who work on dapcal: their newest versions serve


def main() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = [list_ for name, list_ in project["optional-dependencies"].items() if name not in TOOLS]
    for requirement in sorted({*project["dependencies"], *(one for extra in extras for one in extra)}):
        if not requirement.startswith("dapcal["):
            print(lowest(requirement))


def lowest(requirement: str) -> str:
    """`name>=version` as `name==version`; anything else has no lowest version."""
    found = re.fullmatch(r"([A-Za-z0-9._-]+)>=([0-9][0-9.]*)", requirement)
    if found is None:
        raise SystemExit(f"Expected {requirement!r} of pyproject.toml as name>=version; give it a lower bound")
    return f"{found[1]}=={found[2]}"


if __name__ == "__main__":
    main()
