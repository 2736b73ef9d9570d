"""``/openapi.json`` and ``/docs``, made from the models of the bodies."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from .. import __version__
from .body import expected
from .http import OPEN, Path
from .wire import listed

REF = "#/components/schemas/"
ERROR = {
    "description": "What is wrong, and which field is to blame.",
    "content": {"application/json": {"schema": {"$ref": REF + "Error"}}},
}
ENVELOPE = {
    "type": "object",
    "properties": {"error": {
        "type": "object",
        "properties": {name: {"type": ["string", "null"]} for name in
                       ("message", "type", "param", "code")},
    }},
}  # fmt: skip


def document(paths: Sequence[Path], title: str) -> dict[str, Any]:
    """The OpenAPI document of ``paths``."""
    bodies = {path.body for path in paths if path.body is not None}
    _, schemas = models_json_schema(
        [(body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)],
        ref_template=REF + "{model}",
    )
    for body in bodies:
        own = schemas["$defs"][body.__name__]["properties"]
        own |= {k: v for k, v in listed(body.TAKES).items() if k not in own}
    operations: dict[str, dict[str, Any]] = {}
    for one in paths:
        place = one.path.replace("{name:path}", "{name}")
        about = (one.answer.__doc__ or "").strip()
        operation: dict[str, Any] = {
            "summary": about.partition(".")[0], "description": about,
            "responses": {"200": {"description": "The answer."}, "default": ERROR},
        }  # fmt: skip
        names = [part[1:-1] for part in place.split("/") if part.startswith("{")]
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ]
        if one.body is not None:
            content = {"application/json": {"schema": {"$ref": REF + one.body.__name__}}}
            operation["requestBody"] = {"required": True, "content": content}
        if one.path not in OPEN:
            operation["security"] = [{"key": []}]
        operations.setdefault(place, {})[one.verb.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": operations,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": ENVELOPE},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def page(document: dict[str, Any]) -> str:
    """The document as one HTML page that loads nothing from anywhere else."""
    schemas = document["components"]["schemas"]
    parts = []
    for path, verbs in document["paths"].items():
        for verb, operation in verbs.items():
            parts.append(f"<h2><code>{verb.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation['description'])}</p>")
            if "requestBody" in operation:
                ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                parts.append(_table(schemas[ref.removeprefix(REF)], schemas))
    title = html.escape(document["info"]["title"])
    return (
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>body{{font:16px/1.5 "
        "system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}td{padding:.2rem "
        "1rem .2rem 0;vertical-align:top}code{font-size:.9em}</style>"
        f"<h1>{title}</h1><p><a href=/openapi.json>openapi.json</a></p>{''.join(parts)}"
    )


def _table(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """The fields of a body."""
    rows = []
    for name, given in schema["properties"].items():
        part = next((p for p in given.get("anyOf", ()) if p.get("type") != "null"), given)
        inner = part.get("items", part).get("$ref", "").removeprefix(REF)
        text = given.get("description") or part.get("description") or expected(part)
        if inner:
            text = ("a list of " if "items" in part else "") + f"{inner}: " + ", ".join(
                schemas[inner].get("properties", ())
            )  # fmt: skip
        needed = " (required)" if name in schema.get("required", ()) else ""
        rows.append(f"<tr><td><code>{name}</code>{needed}<td>{html.escape(text)}")
    return f"<table>{''.join(rows)}</table>"
