"""A page for people, made from the OpenAPI schema: no scripts, nothing loaded from anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'"}
SHOWN = 2000  # characters of an example
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0 } td, th { text-align: left; padding: .2rem .8rem .2rem 0 }
td, th { border-bottom: 1px solid #ddd; vertical-align: top } code, pre { background: #f4f4f4; padding: .1rem .3rem }
pre { white-space: pre-wrap; padding: .6rem } h2 { margin-top: 2rem }
"""


def page(schema: dict[str, Any]) -> str:
    """HTML about every route of an OpenAPI schema."""
    title, about = escape(schema["info"]["title"]), escape(schema["info"]["description"])
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style></head><body><h1>{title}</h1><p>{about} ",
        'The whole schema: <a href="/openapi.json">/openapi.json</a></p>',
    ]
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            parts += _route(schema, path, method.upper(), route)
    return "\n".join([*parts, "</body></html>"])


def _route(schema: dict[str, Any], path: str, method: str, route: dict[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{method} {escape(path)}</code> {escape(route['summary'])}</h2>"
    yield f"<p>{escape(route.get('description', ''))}</p>"
    if "requestBody" in route:
        body = route["requestBody"]["content"]["application/json"]["schema"]
        example = json.dumps(_example(schema, body), ensure_ascii=False)
        if len(example) > SHOWN:  # of a picture, say
            example = example[:SHOWN] + " …"
        yield f"<p>Body, with <code>Content-Type: application/json</code>, for example:</p><pre>{escape(example)}</pre>"
        yield from _table(schema, body)
    yield "<table><tr><th>status</th><th>answer</th></tr>"
    for status, answer in route["responses"].items():
        yield f"<tr><td>{escape(status)}</td><td>{escape(answer['description'])}</td></tr>"
    yield "</table>"


def _table(schema: dict[str, Any], body: dict[str, Any]) -> Iterator[str]:
    shape = _resolved(schema, body)
    yield "<table><tr><th>name</th><th>value</th><th>required</th><th>about</th></tr>"
    for name, about in shape["properties"].items():
        required = "yes" if name in shape.get("required", ()) else "no"
        words = " ".join([about.get("description", ""), ", ".join(about.get("examples", ()))])
        cells = (f"<code>{escape(name)}</code>", escape(_kind(schema, about)), required, escape(words))
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _kind(schema: dict[str, Any], about: dict[str, Any]) -> str:
    """What a value is, in words."""
    if "anyOf" in about:
        return " or ".join(_kind(schema, choice) for choice in about["anyOf"])
    if about.get("type") != "array":
        return str(_resolved(schema, about)["title"] if "$ref" in about else about["type"])
    few, many = about["minItems"], about["maxItems"]
    return f"list of {few if few == many else f'{few} to {many}'} × {_kind(schema, about['items'])}"


def _example(schema: dict[str, Any], about: dict[str, Any]) -> Any:
    """A value that the schema allows."""
    about = _resolved(schema, about)
    if "anyOf" in about:
        return _example(schema, {**about["anyOf"][0], "examples": about.get("examples")})
    if about["type"] == "object":
        return {name: _example(schema, value) for name, value in about["properties"].items()}
    if about["type"] == "array":
        return [_example(schema, about["items"])] * about["minItems"]
    if about["type"] == "number":
        return 0.5
    return (about.get("examples") or ["text"])[0]


def _resolved(schema: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """A part of the schema, or the component that it refers to."""
    if "$ref" not in about:
        return about
    found: dict[str, Any] = schema["components"]["schemas"][about["$ref"].rpartition("/")[2]]
    return found
