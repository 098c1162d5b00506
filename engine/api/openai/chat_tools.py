"""Validates the ``tools`` of a chat before a template or a grammar uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import RequestError

Tool = Mapping[str, Any]


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises RequestError for the first invalid tool, which would otherwise be shown to the model
    unchanged."""
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        kind = tool.get("type", "function")  # some clients omit the constant type
        if kind != "function":
            raise RequestError(
                f"{where}.type must be 'function': a chat has no other tools here.", f"{where}.type"
            )
        _check_function(tool.get("function"), f"{where}.function")


def _check_function(function: object, where: str) -> None:
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name must be a string that is not empty.", f"{where}.name")
    if not isinstance(function.get("description"), str | None):
        raise RequestError(f"{where}.description must be a string.", f"{where}.description")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise RequestError(f"{where}.parameters must be a JSON schema object.", f"{where}.parameters")
