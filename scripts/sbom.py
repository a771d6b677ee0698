"""What a release is tested with: all versions as constraints for pip, and the same as a CycloneDX bill of materials.

Of the environment that runs it: everything that dapcal[all] needs there, with what that needs.

Run: python scripts/sbom.py dist
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = "dapcal"


def main(folder: Path) -> None:
    graph = needed(ROOT, "all")
    version = metadata.version(ROOT)
    pins = [f"{name}=={metadata.version(name)}" for name in sorted(graph) if name != ROOT]
    folder.mkdir(exist_ok=True)
    (folder / f"dapcal-{version}.constraints.txt").write_text("\n".join(pins) + "\n", encoding="utf-8")
    text = json.dumps(bill(graph), indent=1, ensure_ascii=False)
    (folder / f"dapcal-{version}.cdx.json").write_text(text + "\n", encoding="utf-8")
    print(f"{len(pins)} packages in {folder}/dapcal-{version}.cdx.json")


def needed(root: str, *extras: str) -> dict[str, set[str]]:
    """Every package that is needed, and what it needs itself."""
    graph: dict[str, set[str]] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(root), extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        own = graph.setdefault(name, set())
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            other = canonicalize_name(requirement.name)
            own.update({other} - {name})
            waiting += [(other, further) for further in ("", *requirement.extras)]
    return graph


def bill(graph: dict[str, set[str]]) -> dict[str, Any]:
    """As CycloneDX 1.5 has it; without a time or a serial number, so that the same versions give the same file."""
    parts = {name: component(name) for name in sorted(graph)}
    root = {**parts.pop(ROOT), "type": "application"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": root},
        "components": list(parts.values()),
        "dependencies": [
            {"ref": reference(name), "dependsOn": [reference(other) for other in sorted(graph[name])]}
            for name in sorted(graph)
        ],
    }


def component(name: str) -> dict[str, Any]:
    about = metadata.metadata(name)
    licence = about.get("License-Expression") or about.get("License") or ""
    found = {"type": "library", "bom-ref": reference(name), "name": name, "version": metadata.version(name)}
    found["purl"] = reference(name)
    if about.get("License-Expression"):
        return {**found, "licenses": [{"expression": licence}]}
    return {**found, "licenses": [{"license": {"name": licence}}]} if 0 < len(licence) < 60 else found


def reference(name: str) -> str:
    version = metadata.version(name).replace("+", "%2B")
    return f"pkg:pypi/{name}@{version}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
