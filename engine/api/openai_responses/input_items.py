"""Converts the items of a request and of earlier responses to chat messages.

One reply of the model becomes one message, exactly as the model wrote it: only then does the next prompt
begin with the tokens of this one.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engine.api.openai_responses.custom_input import as_arguments
from engine.api.openai_responses.tools import Tool, ToolName
from engine.api.prompt.chat_messages import Message
from engine.api.prompt.left_out import LeftOut, refuse_part
from engine.errors import RequestError

Item = dict[str, Any]
"""An item keeps all fields of the client's JSON: it is stored and returned unchanged."""

_SEALED = "ctm1:"
"""Prefix of ``encrypted_content`` in this server's reasoning items."""

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}

LEFT_OUT = frozenset(
    (
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "tool_search_call",
        "tool_search_output",
        "program",
        "program_output",
        "configuration_update",
    )
)
"""Records of work by other servers: this model took no part in it, and the messages that follow contain the
results."""


_OF_A_CALL = re.compile(r"\w+_(call|call_output)")
"""Matches items of newer servers: calls of their own tools, and the results."""


def seal_reasoning(text: str) -> str:
    """Encodes reasoning for a client that carries it to the next turn because it is not stored. It is not
    secret: the client gets the text as well."""
    return _SEALED + b64encode(text.encode()).decode()


def easy_items(given: str | list[Item]) -> list[Item]:
    """The request's ``input`` as items; a string is a user message."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return given


def kind_of(item: Mapping[str, Any]) -> object:
    """The type of an item; messages and references may omit it."""
    kind = item.get("type")
    if kind is not None:
        return kind
    if "role" in item:
        return "message"
    return "item_reference" if "id" in item else None


class MessageList:
    """Builds messages item by item. ``where`` names the item in errors."""

    def __init__(
        self,
        instructions: str | None,
        left_out: LeftOut | None = None,
        call_ids: Iterable[str] = (),
    ) -> None:
        """``left_out`` collects notes of what the model is not shown. ``call_ids``: calls of messages before
        these."""
        self.left_out = LeftOut() if left_out is None else left_out
        self._messages: list[Message] = []
        self._reply: Message | None = None
        """The reply that items are still added to; any input ends it."""
        self._said_before = False
        """Whether the last item of the reply was a message: the next message then starts another
        reply."""
        self.call_ids: set[str] = set(call_ids)
        """Ids of the calls until now, which outputs refer to."""
        self.tools: list[tuple[list[Tool], str]] = []
        """Tools that items contain, and the path of each item."""
        if instructions is not None:
            self._tell("system", instructions)

    @property
    def messages(self) -> list[Message]:
        return self._messages

    def extend(self, items: Sequence[Mapping[str, Any]], where: str, *, ends_with_new: bool = False) -> None:
        """Adds the items of one request or one reply, which are never merged with those of another.

        ``ends_with_new``: the user's last message is new, so it is an error if it has content other than
        text, unless it follows tool results. Elsewhere a line of text replaces such content.
        """
        self._end_reply()
        last = len(items) - 1 if ends_with_new else None
        for index, item in enumerate(items):
            follows_results = bool(self._messages) and self._messages[-1]["role"] == "tool"
            self.add(item, f"{where}[{index}]", is_new=index == last and not follows_results)
        self._end_reply()

    def add(self, item: Mapping[str, Any], where: str, *, is_new: bool = False) -> None:
        """Adds one item; RequestError if it is malformed, or cannot be shown to the model."""
        kind = kind_of(item)
        match kind:
            case "message":
                self._add_message(item, where, is_new=is_new)
            case "agent_message":
                self._tell("user", self._text(item.get("content"), f"{where}.content"))
            case "reasoning":
                self._add_reasoning(item, where)
            case "additional_tools":
                self._add_tools(item, where)
            case str() if kind in _CALLS:
                self._add_call(item, *_CALLS[kind](item, where), where)
            case str() if kind in _OUTPUTS:
                self._add_output(item, _OUTPUTS[kind](item, where, self._text), where)
            case _:
                self._leave_out(item, kind, where)

    def _text(self, content: object, where: str, *, is_new: bool = False, shows: bool = True) -> str:
        """``shows``: whether pictures and clips may be shown, which is so for users and tools."""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise RequestError(f"{where} must be a string or a list of text parts.", where)
        parts = enumerate(content)
        return "\n".join(
            self._text_of_part(part, f"{where}[{i}]", is_new=is_new, shows=shows) for i, part in parts
        )

    def _text_of_part(self, part: object, where: str, *, is_new: bool, shows: bool) -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise RequestError(f"{where} must be an object with a type.", f"{where}.type")
        if kind in _TEXT_PARTS:
            return _string(part, _TEXT_PARTS[kind], where)
        if shows and (mark := self.left_out.mark(part, where, is_new=is_new)) is not None:
            return mark
        if is_new:
            error = refuse_part(kind, where, self.left_out)
            error.field = f"{where}.type"
            raise error
        return self.left_out.part(part, where)

    def _add_message(self, item: Mapping[str, Any], where: str, *, is_new: bool) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}.", f"{where}.role")
        is_new = is_new and role == "user"
        content = item.get("content")
        place = f"{where}.content"
        text = self._text(content, place, is_new=is_new, shows=role == "user")
        if role != "assistant":
            self._tell(role, text)
            return
        if self._said_before:
            self._end_reply()
        self._open_reply()["content"] += text
        self._said_before = True

    def _tell(self, role: str, text: str) -> None:
        """Adds input for the model. Templates want one system message, at the front."""
        self._end_reply()
        role = "system" if role == "developer" else role
        if role == "system" and self._messages and all(m["role"] == "system" for m in self._messages):
            self._messages[-1]["content"] += "\n\n" + text
        else:
            self._messages.append({"role": role, "content": text})

    def _add_reasoning(self, item: Mapping[str, Any], where: str) -> None:
        text = _reasoning_of(item, where)
        if text:
            reply = self._open_reply()
            reply["reasoning"] = reply.get("reasoning", "") + text
            self._said_before = False

    def _add_call(self, item: Mapping[str, Any], name: str, arguments: str, where: str) -> None:
        call_id = _string(item, "call_id", where)
        call: Message = {
            "type": "function",
            "id": call_id,
            "function": {"name": name, "arguments": arguments},
        }
        self.call_ids.add(call_id)
        if item.get("type") == "local_shell_call" and isinstance(item.get("id"), str):
            self.call_ids.add(item["id"])
        self._open_reply().setdefault("tool_calls", []).append(call)
        self._said_before = False

    def _add_output(self, item: Mapping[str, Any], text: str, where: str) -> None:
        self._end_reply()
        # OpenAI's shell tool has no call id: the item's id is used.
        is_shells = item.get("type") == "local_shell_call_output" and item.get("call_id") is None
        named = "id" if is_shells else "call_id"
        call_id = _string(item, named, where)
        if call_id not in self.call_ids:
            raise RequestError(
                f"No tool call found for {where}, an output with {named} {call_id[:100]!r}: the call must "
                "come before it, in input or in the turns that input continues.",
                f"{where}.{named}",
            )
        self._messages.append({"role": "tool", "content": text, "tool_call_id": call_id})

    def _add_tools(self, item: Mapping[str, Any], where: str) -> None:
        tools = item.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise RequestError(f"{where}.tools must be a list of tools.", f"{where}.tools")
        self.tools.append((tools, f"{where}.tools"))

    def _leave_out(self, item: Mapping[str, Any], kind: object, where: str) -> None:
        if isinstance(kind, str) and (kind in LEFT_OUT or _OF_A_CALL.fullmatch(kind)):
            self.left_out.add(where, kind)
            return
        if kind in ("compaction", "compaction_summary"):  # only the server that made it can read it
            self._tell("user", self.left_out.part(item, where))
            return
        if kind in ("compaction_trigger", "context_compaction"):
            raise RequestError(
                f"{where} is a {kind} item: this server does not compact conversations.", f"{where}.type"
            )
        shown = repr(kind[:50]) if isinstance(kind, str) else "missing"
        raise RequestError(f"{where}.type is {shown}, which this server does not know.", f"{where}.type")

    def _open_reply(self) -> Message:
        if self._reply is None:
            self._reply = {"role": "assistant", "content": ""}
            self._messages.append(self._reply)
        return self._reply

    def _end_reply(self) -> None:
        self._reply = None
        self._said_before = False


def _called(item: Mapping[str, Any], where: str) -> str:
    """The name with which the model called the tool."""
    namespace = item.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        raise RequestError(f"{where}.namespace must be a string.", f"{where}.namespace")
    return ToolName(_string(item, "name", where), namespace).shown


def _reasoning_of(item: Mapping[str, Any], where: str) -> str:
    """The model's reasoning, from its text or from this server's sealed form; other servers' forms cannot be
    read."""
    content = item.get("content")
    if content:
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise RequestError(f"{where}.content must be a list of parts.", f"{where}.content")
        return "".join(_string(part, "text", f"{where}.content[{i}]") for i, part in enumerate(content))
    sealed = item.get("encrypted_content")
    if not isinstance(sealed, str) or not sealed.startswith(_SEALED):
        return ""
    try:
        return b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        raise RequestError(
            f"{where}.encrypted_content was changed after this server created it.",
            f"{where}.encrypted_content",
        ) from None


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string.", f"{where}.{name}")
    return value


def _json_of(item: Mapping[str, Any], name: str, kind: type, where: str) -> str:
    """Encodes a part of an item as JSON, as the model would write it."""
    value = item.get(name)
    if not isinstance(value, kind):
        what = "an object" if kind is dict else "a list"
        raise RequestError(f"{where}.{name} must be {what}.", f"{where}.{name}")
    return json.dumps(value, ensure_ascii=False)


_CALLS: dict[str, Callable[[Mapping[str, Any], str], tuple[str, str]]] = {
    "function_call": lambda item, where: (_called(item, where), _string(item, "arguments", where)),
    "custom_tool_call": lambda item, where: (
        _called(item, where),
        as_arguments(_string(item, "input", where)),
    ),
    "local_shell_call": lambda item, where: ("local_shell", _json_of(item, "action", dict, where)),
    "shell_call": lambda item, where: ("shell", _json_of(item, "action", dict, where)),
    "computer_call": lambda item, where: ("computer", _json_of(item, "action", dict, where)),
    "apply_patch_call": lambda item, where: ("apply_patch", _json_of(item, "operation", dict, where)),
}
"""Readers of a call's name and arguments, by item type."""

_OUTPUTS: dict[str, Callable[[Mapping[str, Any], str, Callable[[object, str], str]], str]] = {
    "function_call_output": lambda item, where, text: text(item.get("output") or "", f"{where}.output"),
    "custom_tool_call_output": lambda item, where, text: text(item.get("output") or "", f"{where}.output"),
    "local_shell_call_output": lambda item, where, _: _string(item, "output", where),
    "shell_call_output": lambda item, where, _: _json_of(item, "output", list, where),
    "apply_patch_call_output": lambda item, where, text: text(
        item.get("output") or item.get("status"), f"{where}.output"
    ),
    "computer_call_output": lambda item, where, text: text([item.get("output")], f"{where}.output"),
}
"""Readers of a call's output, by item type."""
