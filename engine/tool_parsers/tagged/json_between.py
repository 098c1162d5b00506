"""Formats that write calls as JSON between tags: one call, or a list of them."""

from __future__ import annotations

from engine.tool_parsers.call_object import CallObjectReader
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.tagged_reader import TaggedReader

_LIST = Tag("[")
_LIST_END = Tag("]")
_OBJECT = Tag("{")
_OBJECT_END = Tag("}")
_COLON = Tag(":")
_COMMA = Tag(",")
_MESSAGE_END = Tag("<|message_sep|>")


class JsonBetweenTags(TaggedReader, CallObjectReader):
    """Parses ``{"name": ..., "arguments": {...}}`` after an opening tag, as in Hermes' format."""

    def _opens_at_once(self) -> Steps[bool]:
        """Whether the response begins with a call of one of the tools that has a closing tag but no opening
        one."""
        if self.closing is None:
            return False
        yield from self._skip_space()
        length = self._length
        names_tool = yield from self._names_tool()
        self._at = self._begin + length
        closes = names_tool and (yield from self._read_value()) is not None
        if closes:
            yield from self._skip_space()
            closes = bool((yield from self._accept(self.closing)))
        self._at = self._begin + length
        return closes

    def _names_tool(self) -> Steps[bool]:
        """Whether an object at this position, or in a list here, begins with the name of a tool."""
        yield from self._accept(_LIST)
        yield from self._skip_space()
        if not (yield from self._accept(_OBJECT)):
            return False
        yield from self._skip_space()
        key = yield from self._read_string()
        yield from self._skip_space()
        if key not in self.name_keys or not (yield from self._accept(_COLON)):
            return False
        yield from self._skip_space()
        return (yield from self._read_string()) in self._tools

    def _read_calls(self) -> Steps[bool]:
        yield from self._skip_space()
        if not (yield from self._read_call_objects()):
            return False
        yield from self._skip_closing()
        return True


class GraniteToolParser(JsonBetweenTags):
    """Parses calls of Granite 3: ``<|tool_call|>[...]``; the response's end is its end."""

    opening = Tag("<|tool_call|>", "<tool_call>", line_breaks=1)
    raw_end = Tag("<|tool_call|>")


class GraniteCodeToolParser(JsonBetweenTags):
    """Parses calls of Granite 20B function calling: ``<function_call> {...}`` for each call."""

    opening = Tag("<function_call>", line_breaks=1)
    raw_end = Tag("<function_call>")


class NemotronToolParser(JsonBetweenTags):
    """Parses calls of Llama-Nemotron: ``<TOOLCALL>[...]</TOOLCALL>``."""

    opening = Tag("<TOOLCALL>", line_breaks=1)
    closing = Tag("</TOOLCALL>")
    raw_end = Tag("<TOOLCALL>", "</TOOLCALL>")


class LongCatToolParser(JsonBetweenTags):
    """Parses calls of LongCat: ``<longcat_tool_call>{...}</longcat_tool_call>`` for each call."""

    opening = Tag("<longcat_tool_call>", line_breaks=1)
    closing = Tag("</longcat_tool_call>")
    raw_end = Tag("<longcat_tool_call>", "</longcat_tool_call>")


class InternLmToolParser(JsonBetweenTags):
    """Parses calls of InternLM: ``<|action_start|><|plugin|>{...}<|action_end|>`` for each call; an action
    for the interpreter is not a call."""

    opening = Tag("<|action_start|><|plugin|>")
    closing = Tag("<|action_end|>")
    raw_end = Tag("<|action_start|>", "<|action_end|>")


class GigaChatToolParser(JsonBetweenTags):
    """Parses calls of GigaChat 3: a separate message with the role ``function call``; from 3.1 on
    ``<|function_call|>{...}``."""

    opening = Tag(
        *("<|function_call|>", "function call<|role_sep|>", "<|message_sep|>\n\nfunction call<|role_sep|>")
    )
    raw_end = Tag("<|function_call|>", "<|message_sep|>")

    def _read_calls(self) -> Steps[bool]:
        if not (yield from super()._read_calls()):
            return False
        yield from self._skip_layout(_MESSAGE_END)
        return True


class PhiToolParser(JsonBetweenTags):
    """Parses calls of Phi-4-mini: ``functools[...]``."""

    opening = Tag("functools[", line_breaks=1)
    raw_end = Tag("functools[")

    def _read_calls(self) -> Steps[bool]:
        self._at -= 1  # the bracket is the list's
        return (yield from super()._read_calls())


class ApertusToolParser(TaggedReader, CallObjectReader):
    """Parses calls of Apertus: ``<|tools_prefix|>[{"f": {...}}, {"g": {...}}]<|tools_suffix|>``, with the
    name as key."""

    opening = Tag("<|tools_prefix|>")
    closing = Tag("<|tools_suffix|>")
    raw_end = Tag("<|tools_prefix|>", "<|tools_suffix|>")

    def _read_calls(self) -> Steps[bool]:
        yield from self._skip_space()
        listed = yield from self._accept(_LIST)
        yield from self._skip_space()
        if not (yield from self._read_call()):
            return False
        more = True
        while more:
            more = yield from self._read_next_call()
        if listed:
            yield from self._skip_layout(_LIST_END)
        yield from self._skip_closing()
        return True

    def _read_next_call(self) -> Steps[bool]:
        """Reads a comma and the next call after a call; False if there is none."""
        self._take()
        yield from self._skip_space()
        if (yield from self._accept(_COMMA)):
            yield from self._skip_space()
            if (yield from self._read_call()):
                return True
        self._at = self._begin
        return False

    def _read_call(self) -> Steps[bool]:
        """Reads ``{"f": {...}}``, which is certain once the arguments begin."""
        if not (yield from self._accept(_OBJECT)):
            return False
        yield from self._skip_space()
        name = yield from self._read_string()
        yield from self._skip_space()
        if name is None or not (yield from self._accept(_COLON)):
            return False
        yield from self._skip_space()
        is_object = (yield from self._peek()) == "{"
        self._begin_call(name)
        if not is_object:
            yield from self._pass_raw()
        elif (yield from self._pass_object()):
            yield from self._skip_layout(_OBJECT_END)
        return True
