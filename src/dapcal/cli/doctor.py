"""`dapcal doctor`: what is installed, what runs where and what is missing; or whether a file is whole."""

from __future__ import annotations

import os
import platform
import re
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from dapcal.cli.common import Address, EngineName, Json, Key, Quiet, check_engine, output, typer


def doctor(
    file: Annotated[
        Path | None, typer.Argument(readable=False, help="A saved model, of which every block is checked.")
    ] = None,
    key: Key = None,
    engine: EngineName = "local",
    address: Address = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say which versions, devices, extras and data sets are there, and how to get those that are missing.

    With a file, check all of it, also what loading leaves to be checked when it is used, and say what it holds. With
    --engine ray also the nodes of a cluster, and what is missing there.

    Example: dapcal doctor house.dap
    """
    with output(as_json, quiet) as said:
        check_engine(engine, address)
        if file is not None:
            if engine != "local":
                raise ValueError("A file is checked on this machine; leave --engine out, or the file")
            held = _held(file, key)
            said.result(held, _words_of_file(held))
            return
        if key is not None:
            raise ValueError("Expected a file with --key, got none; name the model that the key is to verify")
        found: dict[str, Any] = {"versions": _versions(), "devices": _devices(), "extras": _extras(), "data": _data()}
        words = _words(found)
        if engine == "ray":
            found["nodes"] = _nodes(address)
            words += "".join(f"\n{line}" for line in _node_words(found["nodes"]))
        said.result(found, words)


def _nodes(address: str | None) -> dict[str, Any]:
    """Versions on every node, and what is wrong with it."""
    from dapcal.engines.nodes import check_versions, connect, nodes_of

    connect(address)
    nodes: dict[str, Any] = {}
    for name, versions in nodes_of().items():
        wrong = None if versions else f"{name} does not answer; see Ray's logs there"
        try:
            check_versions({name: versions})
        except ValueError as error:
            wrong = str(error)
        nodes[name] = {"versions": versions, "wrong": wrong}
    return nodes


def _node_words(nodes: dict[str, Any]) -> list[str]:
    told = (
        ", ".join(f"{what} {version or 'missing'}" for what, version in n["versions"].items()) for n in nodes.values()
    )
    lines = [f"node       {name}: {words}" for name, words in zip(nodes, told, strict=True)]
    return lines + [f"node       {node['wrong']}" for node in nodes.values() if node["wrong"]]


def _held(path: Path, key: Path | None) -> dict[str, Any]:
    """What a file holds, all of which was found to be as it was written."""
    from dapcal import artifact

    stored = artifact.open(path, key)
    stored.check()
    groups = {"posterior": stored.tensors, "beside it": stored.attachments}
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "version": stored.version,
        "signed": stored.is_signed,
        "kind": stored.about.get("kind"),
        "tensors": {
            what: [
                {"name": name, "shape": list(t.shape), "type": str(t.dtype).removeprefix("torch."), "bytes": t.nbytes}
                for name, t in sorted(tensors.items(), key=lambda named: -named[1].nbytes)
            ]
            for what, tensors in groups.items()
        },
    }


_SHOWN = 3  # tensors of each group


def _words_of_file(held: dict[str, Any]) -> str:
    signed = "signed" if held["signed"] else "not signed"
    lines = [f"file       {held['file']}: whole, {_size(held['bytes'])}, format {held['version']}, {signed}"]
    if held["kind"] is not None:
        lines.append(f"kind       {held['kind']}")
    for what, tensors in held["tensors"].items():
        lines.append(f"{what:<10} {len(tensors)} tensors, {_size(sum(t['bytes'] for t in tensors))}")
        lines += [
            f"           {t['name']} {' × '.join(map(str, t['shape']))} {t['type']}, {_size(t['bytes'])}"
            for t in tensors[:_SHOWN]
        ]
    return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def _versions() -> dict[str, str]:
    from dapcal import __version__

    core = {name: metadata.version(name) for name in ("torch", "numpy", "scipy", "safetensors")}
    return {"dapcal": __version__, "python": platform.python_version(), **core}


def _devices() -> dict[str, str]:
    import torch

    devices = {"cpu": f"{torch.get_num_threads()} threads"}
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        devices[f"cuda:{number}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return devices


def _extras() -> dict[str, dict[str, str | None]]:
    """Packages of every extra with their version, None where one is missing; as dapcal's own metadata list them."""
    extras: dict[str, dict[str, str | None]] = defaultdict(dict)
    for requirement in metadata.requires("dapcal") or []:
        found = re.fullmatch(r'([\w.-]+).*;\s*extra\s*==\s*["\']([\w-]+)["\']', requirement)
        if found is not None and found[1] != "dapcal":  # an extra that is made of others
            extras[found[2]][found[1]] = _version(found[1])
    return dict(extras)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _data() -> dict[str, Any]:
    given = os.environ.get("DAPCAL_DATA")
    try:
        from dapcal.experiments.datasets.files import SHA256, cache_folder
    except ImportError:  # the experiments' extra is missing, which is said of it
        return {"DAPCAL_DATA": given, "cache": None, "sets": {}}
    places = [*([Path(given)] if given else []), cache_folder() / "data"]
    there: dict[str, bool] = {}
    for file in SHA256:
        name = file.partition("/")[0]
        there[name] = there.get(name, True) and any((place / file).is_file() for place in places)
    return {"DAPCAL_DATA": given, "cache": str(cache_folder()), "sets": there}


def _words(found: dict[str, Any]) -> str:
    lines = ["versions   " + ", ".join(f"{name} {version}" for name, version in found["versions"].items())]
    lines += [f"device     {name}: {what}" for name, what in found["devices"].items()]
    for extra, packages in found["extras"].items():
        missing = [name for name, version in packages.items() if version is None]
        state = f"missing {', '.join(missing)}: pip install 'dapcal[{extra}]'" if missing else "there"
        lines.append(f"extra      {extra:<12} {state}")
    data = found["data"]
    cache = f"cache {data['cache']}" if data["cache"] else "not looked for without the extra experiments"
    lines.append(f"data       DAPCAL_DATA is {data['DAPCAL_DATA'] or 'not set'}; {cache}")
    for name, there in data["sets"].items():
        absent = "missing (needed by `dapcal reproduce` alone; docs/data.md says where it may lie)"
        lines.append(f"data       {name:<14} {'there' if there else absent}")
    return "\n".join(lines)
