"""What mkdocs does to a page before it shows it: options of commands filled in, links out of `docs/` led home."""

from __future__ import annotations

import re
from typing import Any

import typer.main

from dapcal.cli import app


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    markdown = markdown.replace("](../README.md)", "](index.md)")  # works in the repository
    return re.sub(r"<!-- options of (\w+) -->", lambda found: options(found[1]), markdown)


def options(command: str) -> str:
    """What a command does, an example, and a table of what it takes."""
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    about, _, example = found.help.partition("Example: ")
    names = " ".join(parameter.name.upper() for parameter in found.params if parameter.param_type_name == "argument")
    rows = [
        f"| {_names(parameter)} | {parameter.help} | {_default(parameter)} |"
        for parameter in found.params
        if parameter.name != "help"
    ]
    usage = example.strip() or f"dapcal {command} {names}"
    return "\n".join([about.strip(), "", f"    {usage}", "", "| option | | default |", "|---|---|---|", *rows])


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in parameter.opts)


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    empty = parameter.default is None or parameter.default is False or parameter.default in ((), [])
    return "" if empty else f"`{parameter.default}`"
