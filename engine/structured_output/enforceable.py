"""Reduces the schemas of a request to the parts that can be enforced: the grammar library does not support
everything that clients send.

One tool with an unusual schema must not fail the request. This module does not know the library, only whether
a schema compiles.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from engine.errors import RequestError
from engine.records.structured_outputs import StructuredOutputsParams, ToolArguments

Compile = Callable[[StructuredOutputsParams], object]
"""Raises RequestError if these parameters cannot be enforced."""

MAX_TRIES = 300
"""Maximum compilations for one schema; if that is not enough, the whole schema is left out."""

MAX_DEPTH = 64

_DEFINITIONS = ("$defs", "definitions")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", *_DEFINITIONS)
_LISTS_OF_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_OPTIONS = "x-guidance"
"""Key of options for how the library writes JSON; not part of the schema."""


def enforceable(params: StructuredOutputsParams, compiles: Compile) -> StructuredOutputsParams:
    """Returns the parameters without the parts of lenient schemas that cannot be enforced. RequestError for
    any other part."""
    try:
        compiles(params)
    except RequestError:
        loosened = _loosened(params, compiles)
        if loosened == params:
            raise
        compiles(loosened)
        return loosened
    return params


def without_lenient_schemas(params: StructuredOutputsParams) -> StructuredOutputsParams:
    """Returns the parameters with any object allowed as the arguments of tools that are not strict."""
    arguments = [each if each.strict else _any_object(each) for each in params.arguments or ()]
    return msgspec.structs.replace(params, arguments=arguments or None)


def _loosened(params: StructuredOutputsParams, compiles: Compile) -> StructuredOutputsParams:
    arguments = [_loosened_arguments(each, compiles) for each in params.arguments or ()]
    loosened = msgspec.structs.replace(params, arguments=arguments or None)
    if params.texts is not None:
        return msgspec.structs.replace(loosened, texts=_loosened_texts(params, params.texts, compiles))
    if params.json is None or not params.lenient:
        return loosened
    try:
        schema = json.loads(params.schema_text())
    except (ValueError, RecursionError):
        return loosened

    def follows(text: str) -> bool:
        alone = msgspec.structs.replace(params, json=text, reasoning=None, calls=None, arguments=None)
        return _compiles(alone, compiles) is None

    if follows(params.schema_text()):
        return loosened
    left = _Loosening(schema, follows).result()
    # If nothing is left, it was not a schema, and the error is more useful.
    return msgspec.structs.replace(loosened, json=json.dumps(left)) if left else loosened


def _loosened_arguments(arguments: ToolArguments, compiles: Compile) -> ToolArguments:
    """Returns the reduced schema of a tool's arguments; RequestError that names the tool if it is strict."""

    def fault(text: str) -> RequestError | None:
        alone = StructuredOutputsParams(grammar=f"start: %json {text}\n", asked_in="tools")
        return _compiles(alone, compiles)

    error = fault(arguments.schema)
    if error is None:
        return arguments
    if arguments.strict:
        raise RequestError(
            f"tools: {arguments.tool[:100]!r} is strict, and its schema cannot be enforced. {error}", "tools"
        )
    schema = json.loads(arguments.schema)
    loosened = _Loosening(schema, lambda text: fault(text) is None).result()
    if not isinstance(loosened, dict):
        return _any_object(arguments)
    kept = {**loosened, "type": "object", _OPTIONS: schema[_OPTIONS]}
    return ToolArguments(arguments.tool, json.dumps(kept))


def _loosened_texts(
    params: StructuredOutputsParams, texts: list[str | None], compiles: Compile
) -> list[str | None]:
    """Replaces texts that cannot be between tags by None; RequestError for one that is not a grammar at
    all."""
    kept: list[str | None] = []
    for number, text in enumerate(texts):
        if text is not None:
            compiles(StructuredOutputsParams(grammar=text, asked_in=params.asked_in))
        others = [each if index == number else None for index, each in enumerate(texts)]
        fails = _compiles(msgspec.structs.replace(params, texts=others), compiles) is not None
        kept.append(None if fails else text)
    return kept


def _any_object(arguments: ToolArguments) -> ToolArguments:
    options = json.loads(arguments.schema)[_OPTIONS]
    return ToolArguments(arguments.tool, json.dumps({"type": "object", _OPTIONS: options}))


def _compiles(params: StructuredOutputsParams, compiles: Compile) -> RequestError | None:
    """The error of compiling the parameters; None if they compile."""
    try:
        compiles(params)
    except RequestError as error:
        return error
    return None


class _Loosening:
    """Reduces a schema by the smallest parts that cannot be enforced."""

    def __init__(self, schema: Any, follows: Callable[[str], bool]) -> None:
        self._schema = schema
        self._follows = follows
        self._num_tries = 0
        self._beside: dict[str, Any] = {}
        """Added to each part that is tried: definitions that it may refer to, and options."""

    def result(self) -> Any:
        """Returns the remaining schema; one without keywords allows everything."""
        if not isinstance(self._schema, dict):
            return {}
        schema = dict(self._schema)
        self._beside = {key: schema[key] for key in (*_DEFINITIONS, _OPTIONS) if key in schema}
        for key in _DEFINITIONS:
            if isinstance(schema.get(key), dict):
                parts = {name: self._loosen(part, 1) for name, part in schema[key].items()}
                self._beside[key] = schema[key] = parts
        return self._loosen(schema, 0)

    def _can_follow(self, part: dict[str, Any]) -> bool:
        self._num_tries += 1
        return self._num_tries <= MAX_TRIES and self._follows(json.dumps({**self._beside, **part}))

    def _loosen(self, part: Any, depth: int) -> Any:
        if isinstance(part, bool):
            return part
        if not isinstance(part, dict) or depth > MAX_DEPTH:
            return {}
        if self._can_follow(part):
            return part
        inner = {key: self._loosen_inner(key, value, depth + 1) for key, value in part.items()}
        if self._can_follow(inner):
            return inner
        kept: dict[str, Any] = {}
        for key, value in inner.items():
            if self._can_follow({**kept, key: value}):
                kept[key] = value
        return kept

    def _loosen_inner(self, key: str, value: Any, depth: int) -> Any:
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            return {name: self._loosen(part, depth) for name, part in value.items()}
        if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            return [self._loosen(part, depth) for part in value]
        return self._loosen(value, depth) if key in _SCHEMAS else value
