"""Builds the JSON object of arguments for formats that write the parameters one by one.

The tool's JSON schema determines the type of a parameter's text: ``5`` is a number for an integer, and text
for a string. This module does not know formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.tool_parsers.python_literal import literal_json

Tool = Mapping[str, Any]
"""A function tool in the format of OpenAI's chat completions."""

Types = frozenset[str]
"""Names of JSON schema's types; empty if a schema does not state one."""

STRING: Types = frozenset({"string"})
_MAX_REFERENCES = 8


class ToolSchemas:
    """The tools that a response may call."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._functions: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._functions[function["name"]] = function

    @property
    def names(self) -> list[str]:
        return list(self._functions)

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def knows_parameters(self, function: str) -> bool:
        """Whether the tool declares its parameters."""
        schema = self._functions.get(function, {}).get("parameters")
        return isinstance(schema, Mapping) and bool(schema.get("properties"))

    def types_at(self, function: str, path: Sequence[str]) -> Types | None:
        """The types of a value inside a parameter. The path has names of members, and ``item`` for items of a
        list. None if the tool does not define it."""
        schema: Any = self._functions.get(function, {}).get("parameters")
        for name in path:
            if not isinstance(schema, Mapping):
                return None
            members = schema.get("properties")
            items = schema.get("items")
            inside = members.get(name) if isinstance(members, Mapping) else None
            schema = items if inside is None and name == "item" else inside
        if not isinstance(schema, Mapping):
            return None
        root = self._functions.get(function, {}).get("parameters")
        return frozenset(_types_in(schema, root, _MAX_REFERENCES))

    def types(self, function: str, parameter: str) -> Types | None:
        """The types that the parameter may have; None if the tool has no such parameter."""
        schema = self._functions.get(function, {}).get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping) or parameter not in properties:
            return None
        return frozenset(_types_in(properties[parameter], schema, _MAX_REFERENCES))


def _types_in(schema: Any, root: Any, num_references: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or num_references == 0:
        return
    named = schema.get("type")
    if named is not None:
        yield from [named] if isinstance(named, str) else [name for name in named if isinstance(name, str)]
        return
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            yield from (_type_of(value) for value in values)
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key) or []:
            yield from _types_in(part, root, num_references - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        yield from _types_in(target, root, num_references - 1)


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    kinds: list[tuple[type, str]] = [
        (bool, "boolean"),
        (str, "string"),
        (int, "integer"),
        (float, "number"),
        (list, "array"),
    ]
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


class ArgumentText:
    """The JSON text of an arguments object that grows one parameter at a time."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Names of the parameters so far."""
        self.has_body = False
        """Whether all arguments were written as one object."""
        self.said_instead = ""
        """Text in place of arguments that is not an object."""
        self._has_members = False

    @property
    def has_begun(self) -> bool:
        return self.has_body or self._has_members

    def key(self, name: str) -> str:
        """Returns the text before the next parameter's value."""
        before = ", " if self._has_members else "{"
        self._has_members = True
        self.names.add(name)
        return before + json.dumps(name, ensure_ascii=False) + ": "

    def members(self, text: str) -> str:
        """Returns the text of all members of an object written as JSON."""
        inner = text[1:-1].strip()
        before = ", " if self._has_members else "{"
        self._has_members = self._has_members or bool(inner)
        return before + inner if inner else ""

    def end(self) -> str:
        if self.has_body:
            return ""
        if self._has_members:
            return "}"
        return self.said_instead.strip() or "{}"


class ValueText:
    """The JSON text of one value whose plain text arrives in pieces.

    A string is passed on as it arrives; a value of another possible type is decided on when it is complete.
    """

    def __init__(self, types: Types, *, is_json: bool = False) -> None:
        """``is_json``: a string in quotes is a string, even if the schema allows any text."""
        self._types = types
        self._is_json = is_json
        self._held = ""
        self._is_string = types == STRING and not is_json
        self._begun = False

    @property
    def is_empty(self) -> bool:
        """Whether there was no text."""
        return not self._begun and not self._held

    @property
    def held(self) -> str:
        """The text of a value that is not decided on yet."""
        return self._held

    def add(self, piece: str) -> str:
        if self._is_string:
            return self._string(piece)
        held = self._held
        self._held = ""
        held += piece  # no other reference exists, so it grows in place
        self._held = held
        if (
            not self._is_json
            and self._types == {"string", "null"}
            and not any(null.startswith(self._held) for null in ("null", "None"))
        ):
            self._is_string = True
            self._held = ""
            return self._string(held)
        return ""

    def end(self) -> str:
        if self._is_string:
            return self._string("") + '"'
        if self._is_json and _json_type(self._held) == "string":
            return self._held.strip()
        return value_text(self._held, self._types)

    def _string(self, piece: str) -> str:
        quote = "" if self._begun else '"'
        self._begun = True
        return quote + json.dumps(piece, ensure_ascii=False)[1:-1]


def value_text(text: str, types: Types) -> str:
    """The JSON of a value written as plain text: JSON or Python if its type allows that, else a string."""
    stripped = text.strip()
    if types == {"string", "null"}:
        return "null" if stripped in ("null", "None") else json.dumps(text, ensure_ascii=False)
    for read in (stripped, literal_json(stripped)) if types != STRING else ():
        kind = None if read is None else _json_type(read)
        if read is not None and kind is not None and _allows(types, kind):
            return read
    return json.dumps(text, ensure_ascii=False)


def _json_type(text: str) -> str | None:
    """The type of a JSON text; None if it is not JSON."""
    try:
        value: object = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return _type_of(value)


def _refuse(constant: str) -> float:
    """Raises ValueError for ``NaN`` and ``Infinity``, which JSON does not have."""
    raise ValueError(constant)


def _allows(types: Types, kind: str) -> bool:
    """Whether a text of this kind is a value of one of these types.

    A model that writes a list instead of an object, for example, has still written JSON; but a string in
    quotes is text including the quotes if the schema allows strings.
    """
    if kind == "string":
        return "string" not in types
    if "string" not in types:
        return True
    return kind in types or (kind == "integer" and "number" in types)
