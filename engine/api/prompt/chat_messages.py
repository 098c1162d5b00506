"""Normalizes a chat's messages from what clients send to what chat templates expect. Text only."""

from __future__ import annotations

from typing import Any

from engine.errors import RequestError
from engine.tokenization.parted_text import PartedText
from engine.tokenization.tool_arguments import read_arguments

Message = dict[str, Any]
"""A message keeps all fields of the client's JSON, since templates may read fields that are unknown here."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_CHAT_ROLES = {"developer": "system", "function": "tool"}
"""Maps other roles to the names that templates know."""
_REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
"""V1's responses use one name for reasoning and templates use others, so a message gets all of
them."""
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


def normalize(messages: list[Message]) -> list[Message]:
    """Converts contents to strings that keep their parts, and tool call arguments to objects. A RequestError
    names the faulty message."""
    return [_normalize_one(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalize_one(message: Message, where: str) -> Message:
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}.", f"{where}.role")
    calls = message.get("tool_calls") or _older_call(message)
    content = _text_of(message.get("content"), f"{where}.content")
    if content is None and role not in ("assistant", "tool", "function"):
        raise RequestError(f"{where}.content must be a string or a list of text parts.", f"{where}.content")
    normal = {**message, "role": _CHAT_ROLES.get(role, role), "content": content or ""}
    if reasoning := _reasoning_of(message):
        normal.update(dict.fromkeys(_REASONING_FIELDS, reasoning))
    if calls:
        normal["tool_calls"] = _normalize_calls(calls, f"{where}.tool_calls")
    else:
        normal.pop("tool_calls", None)
    return normal


def _older_call(message: Message) -> list[Message]:
    """Converts the ``function_call`` of a message, which older clients send instead of ``tool_calls``."""
    function = message.get("function_call") if message.get("role") == "assistant" else None
    return [{"type": "function", "id": "call_0", "function": function}] if function else []


def _reasoning_of(message: Message) -> str | None:
    """The model's reasoning, under any of the names that clients use when they send it back."""
    for name in _REASONING_FIELDS:
        reasoning = message.get(name)
        if isinstance(reasoning, str) and reasoning:
            return reasoning
    return None


def _text_of(content: object, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts.", where)
    return PartedText.of([_text_of_part(part, f"{where}[{index}]") for index, part in enumerate(content)])


def _text_of_part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise RequestError(f"{where} must be an object with a type.", where)
    if kind not in TEXT_PARTS:
        raise RequestError(f"{where} is of type {kind[:50]!r}; this server takes text only.", where)
    text = part.get("text" if kind.endswith("text") else kind)
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string.", where)
    return text


def _normalize_calls(calls: object, where: str) -> list[Message]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list.", where)
    return [_normalize_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _normalize_call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise RequestError(f"{where} must have a function with a name.", where)
    return {**call, "function": {**function, "arguments": _arguments_of(function.get("arguments"), where)}}


def _arguments_of(arguments: object, where: str) -> Message | str:
    """Arguments as an object, since templates serialize them as JSON themselves. Invalid JSON stays text."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise RequestError(f"{where}.function.arguments must be a JSON string.", where)
    value = read_arguments(arguments)
    if isinstance(value, dict):
        return value
    # The text under ``INVALID_JSON``, unless it was written as JSON itself.
    return value if isinstance(value, str) and arguments.lstrip().startswith("{") else arguments
