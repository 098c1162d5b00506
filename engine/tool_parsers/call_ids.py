"""Ids of tool calls in the form that a format's chat templates accept.

Kimi's templates render only the id of a call, which names the function; Mistral's refuse ids of any other
form. A history may come from another server, or from a client that makes its own ids.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Sequence
from typing import Any, Protocol

Message = dict[str, Any]
_LETTERS = string.ascii_letters + string.digits


class CallIds(Protocol):
    """The ids of one format."""

    def native(self, call_id: str, function: str, number: int) -> str:
        """Returns the id itself if templates accept it, else one that they accept. ``number``: number of
        calls before it in the conversation."""


class KimiIds:
    """Ids such as ``functions.name:3``."""

    def native(self, call_id: str, function: str, number: int) -> str:
        is_native = re.fullmatch(rf"functions\.{re.escape(function)}:\d+", call_id)
        return call_id if is_native else f"functions.{function}:{number}"


class MistralIds:
    """Ids of nine letters or digits."""

    def native(self, call_id: str, function: str, number: int) -> str:
        if re.fullmatch(r"[a-zA-Z0-9]{9}", call_id):
            return call_id
        digest = hashlib.sha256(f"{call_id}\0{number}".encode("utf-8", "surrogatepass")).digest()
        return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:9])


def with_native_ids(messages: Sequence[Message], ids: CallIds) -> list[Message]:
    """Returns the messages of a history with native ids for its calls and their results."""
    renamed: dict[str, str] = {}
    number = 0
    told = []
    for message in messages:
        if calls := message.get("tool_calls"):
            named = [_named(call, ids, number + index, renamed) for index, call in enumerate(calls)]
            number += len(calls)
            message = {**message, "tool_calls": named}
        elif message.get("tool_call_id") in renamed:
            message = {**message, "tool_call_id": renamed[message["tool_call_id"]]}
        told.append(message)
    return told


def _named(call: Message, ids: CallIds, number: int, renamed: dict[str, str]) -> Message:
    call_id = call.get("id") if isinstance(call.get("id"), str) else ""
    native = ids.native(call_id or "", call["function"]["name"], number)
    if call_id:
        renamed[call_id] = native
    return {**call, "id": native}
