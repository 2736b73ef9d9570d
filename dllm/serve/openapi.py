"""``/openapi.json``, made from the models of the bodies."""

from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from .. import __version__
from .http import PUBLIC, Path
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


def document(paths: Sequence[Path], title: str, keyed: bool) -> dict[str, Any]:
    """The OpenAPI document of ``paths``, which need a key where ``keyed``."""
    bodies = {path.body for path in paths if path.body is not None}
    _, schemas = models_json_schema(
        [(body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)],
        ref_template=REF + "{model}",
    )
    for body in bodies:
        own = schemas["$defs"][body.__name__]["properties"]
        own |= {k: v for k, v in listed(body.TAKES).items() if k not in own}
        for name, (reason, harmless) in body.REFUSED.items():
            own[name] = {"description": reason, "enum": [None, *harmless]}
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
        if keyed and one.path not in PUBLIC:
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
