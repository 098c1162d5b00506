"""The OpenAPI description: each endpoint with its body, responses and errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from engine.api.errors import AnthropicErrorResponse, ApiFormat, ErrorResponse
from engine.api.http import sse

Schema = dict[str, Any]
"""A part of the document, as JSON."""

_COMPONENTS = "#/components/schemas/"
_ERRORS = {ApiFormat.OPENAI: ErrorResponse, ApiFormat.ANTHROPIC: AnthropicErrorResponse}
_EMPTY = frozenset(("/health", "/ping"))
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def describe_api(app: FastAPI, *, model_names: Sequence[str], needs_key: bool) -> Schema:
    """Builds the OpenAPI document. ``needs_key``: requests need an API key."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = msgspec.json.schema_components(tuple(_ERRORS.values()), ref_template=_COMPONENTS + "{name}")
    for path, operation in _operations(document):
        _add_parameters(operation, path)
        _add_responses(operation, path)
        _name_models(operation, model_names)
        schemas |= _with_shared_schemas(operation)
    document["components"] = {"schemas": schemas}
    if needs_key:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"bearer": []}, {"header": []}]
    return document


def _operations(document: Schema) -> Iterator[tuple[str, Schema]]:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            yield path, operation


def _add_parameters(operation: Schema, path: str) -> None:
    """Adds the path parameters, which the framework does not know because endpoints read them themselves."""
    names = _PLACEHOLDER.findall(path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]


def _add_responses(operation: Schema, path: str) -> None:
    kind = _ERRORS[ApiFormat.of_path(path)]
    error = {"schema": {"$ref": _COMPONENTS + kind.__name__}}
    operation["responses"] = {
        "200": {"description": "What was asked for.", "content": _answers(operation, path)},
        "default": {"description": "Why not.", "content": {"application/json": error}},
    }


def _answers(operation: Schema, path: str) -> Schema:
    if path in _EMPTY:
        return {}
    if path == "/metrics":
        return {"text/plain": {"schema": {"type": "string"}}}
    answers: Schema = {"application/json": {"schema": {}}}
    if "stream" in _body_schema(operation).get("properties", {}) and not path.endswith("/render"):
        answers[sse.MEDIA_TYPE] = {}  # OpenAPI 3.1 has no schema for the events of a stream
    return answers


def _name_models(operation: Schema, names: Sequence[str]) -> None:
    fields = _body_schema(operation).get("properties", {})
    if "model" in fields:
        fields["model"] = {"title": "Model", "enum": [*names, None]}


def _body_schema(operation: Schema) -> Schema:
    schema: Schema = (
        operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    )
    return schema


def _with_shared_schemas(operation: Schema) -> dict[str, Schema]:
    """Moves the schemas that a body's schema defines to the shared ones, and updates its references."""
    body = _body_schema(operation)
    brought = body.pop("$defs", {})
    names = {f"#/$defs/{name}": f"{body['title']}.{name}" for name in brought}
    _rename_references([body, brought], names)
    return {names[f"#/$defs/{name}"]: schema for name, schema in brought.items()}


def _rename_references(part: Any, names: dict[str, str]) -> None:
    if isinstance(part, list):
        for item in part:
            _rename_references(item, names)
    elif isinstance(part, dict):
        if part.get("$ref") in names:
            part["$ref"] = _COMPONENTS + names[part["$ref"]]
        for item in part.values():
            _rename_references(item, names)
