"""Converts ``system`` and ``messages`` of a Messages request to a chat, so that each turn extends
the last.

The rules and their purpose:

* Texts of one message are joined by a newline; those of an assistant by nothing, as its blocks are
  one reply that was split at its calls. Consecutive messages of a role are merged, as in
  Anthropic's API.
* ``thinking`` becomes the assistant's reasoning; ``redacted_thinking`` is unreadable and is left
  out.
* Each ``tool_result`` becomes a tool message; text besides results becomes a user message after
  them. One with ``is_error`` says so in its text.
* A ``system`` message in the middle becomes a reminder in the user's (or tool's) message before
  it: moving it to the front would change the whole prompt, and as a separate turn after results
  many templates would drop the reasoning before it.
* What Anthropic's servers ran (server tools, MCP, code execution) is left out, calls and results.
* A mark stands for a picture or clip of a user or a tool if the model reads such parts.
* A line of text stands for a document that is not text, and for a picture that is not shown. One in
  the user's last message, without tool results, is refused.
* A last message of the assistant is continued.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from engine.api.anthropic.thinking import text_of
from engine.api.prompt.chat_messages import Message
from engine.api.prompt.left_out import LeftOut
from engine.api.prompt.system_messages import reminder_of
from engine.errors import RequestError
from engine.tokenization.tool_arguments import INVALID_JSON

Block = dict[str, Any]

_LEFT_OUT = re.compile(
    r"redacted_thinking|server_tool_use|mcp_tool_use|mcp_tool_result|\w+_tool_result|container_upload|fallback"
)
_OUR_CALL_ID = re.compile(r"toolu_([0-9a-f]{24})")


@dataclass(slots=True)
class ChatHistory:
    """A conversation that is being converted to OpenAI's chat format."""

    messages: list[Message] = field(default_factory=list)
    _reminders: list[str] = field(default_factory=list)
    """System messages between a call and its results, kept until the results arrive."""

    @property
    def continues_reply(self) -> bool:
        """Whether the model continues the last message."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    @property
    def ends_with_results(self) -> bool:
        """Whether the last message is a tool result."""
        return bool(self.messages) and self.messages[-1]["role"] == "tool"

    def add_system(self, texts: Iterator[str]) -> None:
        """Adds ``system``, or a system message before all others, which becomes part of it."""
        text = "\n".join(filter(None, texts))
        if text and self.messages:
            self.messages[0]["content"] += "\n" + text
        elif text:
            self.messages.append({"role": "system", "content": text})

    def add_reminder(self, texts: Iterator[str]) -> None:
        """Adds a system message in the middle of the conversation."""
        text = "\n".join(filter(None, texts))
        if not text:
            return
        reminder = reminder_of(text)
        last = self.messages[-1]
        if last.get("tool_calls"):
            self._reminders.append(reminder)
        elif last["role"] in ("user", "tool"):
            last["content"] += "\n" + reminder
        else:
            self.messages.append({"role": "user", "content": reminder})

    def _give_reminders(self) -> None:
        if self._reminders:
            text = "\n".join(self._reminders)
            self._reminders.clear()
            self.add_user(text)

    def add_user(self, text: str) -> None:
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"] += "\n" + text
        else:
            self.messages.append({"role": "user", "content": text})

    def add_results(self, results: list[Message]) -> None:
        self.messages += results
        if results and self._reminders:
            self.messages[-1]["content"] += "\n" + "\n".join(self._reminders)
            self._reminders.clear()

    def add_assistant(self, reply: Message) -> None:
        self._give_reminders()
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append(reply)
            return
        last = self.messages[-1]
        for key in ("content", "reasoning", "tool_calls"):
            if key in reply:
                last[key] = last[key] + reply[key] if key in last else reply[key]

    def finish(self) -> None:
        """Ends the conversation."""
        self._give_reminders()
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == "assistant":
            if last.get("tool_calls"):
                raise RequestError(
                    "messages ends with tool_use blocks; their tool_result blocks must follow.", "messages"
                )
            if not last["content"].strip():
                self.messages.pop()


def read_history(
    system: str | list[Block] | None, messages: list[Block], left_out: LeftOut | None = None
) -> ChatHistory:
    """Returns the chat's messages; a RequestError names the invalid field. ``left_out`` notes what was left
    out."""
    history = ChatHistory()
    reader = _TextReader(LeftOut() if left_out is None else left_out)
    new = replace(reader, is_new=True)
    told = replace(reader, shows=False)
    history.add_system(replace(told, is_new=True).texts(system or [], "system"))
    is_leading = True
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        role = message.get("role")
        content = _blocks(message, where)
        is_leading = is_leading and role == "system"
        match role:
            case "system" if is_leading:
                history.add_system(told.texts(content, f"{where}.content"))
            case "system":
                history.add_reminder(told.texts(content, f"{where}.content"))
            case "user":
                is_own = index == len(messages) - 1 and not history.ends_with_results
                _read_user(history, content, f"{where}.content", new if is_own else reader)
            case "assistant":
                history.add_assistant(_assistant(content, f"{where}.content", reader))
            case _:
                raise RequestError(f"{where}.role must be user, assistant or system.", f"{where}.role")
    history.finish()
    if not any(message["role"] != "system" for message in history.messages):
        raise RequestError("messages must hold a message that is not a system message.", "messages")
    return history


def _blocks(message: Block, where: str) -> str | list[Block]:
    content = message.get("content")
    if not isinstance(content, str | list):
        raise RequestError(f"{where}.content must be a string or a list of blocks.", f"{where}.content")
    return content


def _typed(content: str | list[Block], where: str) -> Iterator[tuple[str, Block, str]]:
    """Yields each block with its type and path."""
    if isinstance(content, str):
        yield "text", {"text": content}, where
        return
    for index, block in enumerate(content):
        place = f"{where}.{index}"
        if not isinstance(block, dict):
            raise RequestError(f"{place} must be an object with a type.", place)
        kind = block.get("type")
        if not isinstance(kind, str):
            raise RequestError(f"{place}.type must be a string.", f"{place}.type")
        yield kind, block, place


@dataclass(frozen=True, slots=True)
class _TextReader:
    """Converts blocks to texts, with placeholder lines for other content."""

    left_out: LeftOut
    is_new: bool = False
    """Whether the message is new: content other than text is then refused."""
    shows: bool = True
    """Whether pictures and clips may be shown here, which is so for users and tools."""

    def texts(self, content: str | list[Block], where: str) -> Iterator[str]:
        """Yields the texts of blocks that must all be text."""
        for kind, block, place in _typed(content, where):
            if kind == "text":
                yield _string(block, "text", place)
            else:
                yield self._other(kind, block, place, "text")

    def shown(self, content: str | list[Block], where: str) -> Iterator[str]:
        """Yields the texts of blocks of a user's message or a tool result."""
        for kind, block, place in _typed(content, where):
            if _LEFT_OUT.fullmatch(kind):
                self.left_out.add(place, kind)
            else:
                yield self.of_block(kind, block, place)

    def of_block(self, kind: str, block: Block, where: str) -> str:
        """The text of one such block."""
        match kind:
            case "text":
                return _string(block, "text", where)
            case "document":
                return self._document(block, where)
            case "search_result":
                texts = "\n".join(self.texts(_blocks(block, where), f"{where}.content"))
                return f"{_string(block, 'title', where)}\n{_string(block, 'source', where)}\n{texts}"
            case "tool_reference":
                return f"The tool {_string(block, 'tool_name', where)} is available."
        known = "text, tool_result, search_result, tool_reference and documents of text"
        return self._other(kind, block, where, known)

    def _document(self, block: Block, where: str) -> str:
        source = block.get("source")
        kind = source.get("type") if isinstance(source, dict) else None
        if not isinstance(source, dict) or kind not in ("text", "content"):
            if not self.is_new:
                return self.left_out.part(block, where)
            raise RequestError(
                f"{where}.source.type must be text or content: this server reads no other documents.",
                f"{where}.source.type",
            )
        if kind == "text":
            text = _string(source, "data", f"{where}.source")
        else:
            text = "\n".join(self.texts(_blocks(source, f"{where}.source"), f"{where}.source.content"))
        heads = [block.get(name) for name in ("title", "context")]
        return "\n".join([*(head for head in heads if isinstance(head, str) and head), text])

    def _other(self, kind: str, block: Block, where: str, known: str) -> str:
        if self.shows and (mark := self.left_out.mark(block, where, is_new=self.is_new)) is not None:
            return mark
        if self.is_new:
            raise _unsupported(kind, where, known)
        return self.left_out.part(block, where)


def _read_user(history: ChatHistory, content: str | list[Block], where: str, reader: _TextReader) -> None:
    results: list[Message] = []
    texts: list[str] = []
    blocks = list(_typed(content, where))
    in_history = replace(reader, is_new=False)
    if any(kind == "tool_result" for kind, _, _ in blocks):
        reader = in_history
    for kind, block, place in blocks:
        if kind == "tool_result":
            results.append(_tool_message(block, place, in_history))
        elif _LEFT_OUT.fullmatch(kind):
            reader.left_out.add(place, kind)
        else:
            texts.append(reader.of_block(kind, block, place))
    history.add_results(results)
    if texts or not results:
        history.add_user("\n".join(texts))


def _tool_message(block: Block, where: str, reader: _TextReader) -> Message:
    call_id = _call_id(_string(block, "tool_use_id", where))
    content = block.get("content")
    if content is not None and not isinstance(content, str | list):
        raise RequestError(f"{where}.content must be a string or a list of blocks.", f"{where}.content")
    text = "\n".join(reader.shown(content or [], f"{where}.content"))
    if block.get("is_error") and text[:5].lower() != "error":
        text = f"Error: {text}" if text else "Error"
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _assistant(content: str | list[Block], where: str, reader: _TextReader) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Message] = []
    for kind, block, place in _typed(content, where):
        match kind:
            case "text":
                texts.append(_string(block, "text", place))
            case "thinking":
                reasoning.append(text_of(_string(block, "thinking", place), block.get("signature")))
            case "tool_use":
                calls.append(_tool_call(block, place))
            case "compaction":
                texts.append(_string(block, "content", place))
            case "redacted_thinking":
                pass
            case _ if _LEFT_OUT.fullmatch(kind):
                reader.left_out.add(place, kind)
            case _:
                texts.append(reader.left_out.part(block, place))
    reply: Message = {"role": "assistant", "content": "".join(texts)}
    if any(reasoning):
        reply["reasoning"] = "".join(reasoning)
    if calls:
        reply["tool_calls"] = calls
    return reply


def _tool_call(block: Block, where: str) -> Message:
    arguments = {} if block.get("input") is None else block["input"]
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.input must be an object.", f"{where}.input")
    if isinstance(arguments.get(INVALID_JSON), str):
        arguments = arguments[INVALID_JSON]
    function = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _call_id(_string(block, "id", where)), "type": "function", "function": function}


def _call_id(tool_use_id: str) -> str:
    """The call id in the model's own format: ``tool_use_id`` reversed."""
    ours = _OUR_CALL_ID.fullmatch(tool_use_id)
    return f"call_{ours[1]}" if ours else tool_use_id.removeprefix("toolu_")


def tool_use_id(call_id: str) -> str:
    """The call's id as Anthropic's clients see it."""
    return f"toolu_{call_id.removeprefix('call_')}"


def _string(block: Block, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string.", f"{where}.{name}")
    return value


def _unsupported(kind: str, where: str, known: str) -> RequestError:
    return RequestError(
        f"{where}.type {kind[:50]!r} is not supported here; this server takes {known}.", f"{where}.type"
    )
