"""Tool calls of Gemma 4: ``<|tool_call>call:f{k:<|"|>text<|"|>,n:5,l:[1,2]}<tool_call|>``.

Keys are bare; strings stand between tokens of their own, as they are; objects and lists may be nested.
The arguments are given on as JSON while they come. FunctionGemma has other tokens.
"""

from __future__ import annotations

import json
import re

from engine.tool_parsers.call_object import CallObjectReader
from engine.tool_parsers.parameters import value_text
from engine.tool_parsers.reader import Steps, Tag, TaggedReader

_NAME = re.compile(r"[^\s<>{}\[\]\"'=,()]*+")
_KEY = re.compile(r"[^<>{}\[\],:\"]*+")
_SCALAR_END = Tag(",", "}", "]", "<tool_call|>", "<end_function_call>")
_CALL = Tag("call:")
_OBJECT, _OBJECT_END = Tag("{"), Tag("}")
_LIST, _LIST_END = Tag("["), Tag("]")
_COLON, _COMMA = Tag(":"), Tag(",")
MAX_DEPTH = 32
"""Deeper values are read as text."""


class GemmaToolParser(TaggedReader, CallObjectReader):
    """Parses one response; see the module's text for what is a call."""

    opening = Tag("<|tool_call>", line_breaks=1)
    closing = Tag("<tool_call|>")
    raw_end = Tag("<|tool_call>", "<tool_call|>")
    quote = Tag('<|"|>')

    def _read_calls(self) -> Steps[bool]:
        yield from self._skip_space()
        if (yield from self._peek()) == "{":
            return (yield from self._read_json())
        if not (yield from self._accept(_CALL)):
            return False
        yield from self._skip_space()
        name = yield from self._read_word(_NAME)
        yield from self._skip_space()
        if not name or (yield from self._peek()) != "{":
            return False
        self._begin_call(name)
        if (yield from self._pass_members(0)):
            yield from self._skip_closing()
        else:
            yield from self._leave_call()
        return True

    def _read_json(self) -> Steps[bool]:
        if not (yield from self._read_call_objects()):
            return False
        yield from self._skip_closing()
        return True

    def _leave_call(self) -> Steps[None]:
        """Of arguments that make no sense from here on, the rest is discarded with the call's end."""
        self._take()
        if not (yield from self._find(Tag(*self.closing.texts, *self.opening.texts))):
            self.is_cut = True
        elif self._unsettled.endswith(self.opening.texts):
            self._at -= len(self.opening.texts[0])
        self._take()

    def _pass_members(self, depth: int) -> Steps[bool]:
        """Pass on the object at this position as JSON; False if it is cut off or goes wrong."""
        yield from self._accept(_OBJECT)
        self._give_taken("{")
        yield from self._skip_space()
        first = True
        while not (yield from self._accept(_OBJECT_END)):
            if not first and not (yield from self._accept(_COMMA)):
                return False
            yield from self._skip_space()
            key = yield from self._read_key()
            if key is None:
                return False
            self._give_taken(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            if not (yield from self._pass_value(depth + 1)):
                return False
            yield from self._skip_space()
            first = False
        self._give_taken("}")
        return True

    def _read_key(self) -> Steps[str | None]:
        """The key at this position and its colon; None if there is none."""
        if (yield from self._accept(self.quote)):
            key = yield from self._read_until(self.quote)
        elif (yield from self._peek()) == '"':
            key = yield from self._read_string()
        else:
            key = (yield from self._read_word(_KEY)).strip() or None
        yield from self._skip_space()
        return key if key is not None and (yield from self._accept(_COLON)) else None

    def _pass_value(self, depth: int) -> Steps[bool]:
        """Pass on the value at this position as JSON; False if it is cut off or goes wrong."""
        yield from self._skip_space()
        if (yield from self._accept(self.quote)):
            return (yield from self._pass_text())
        begins = yield from self._peek()
        if begins == "{" and depth < MAX_DEPTH:
            return (yield from self._pass_members(depth))
        if begins == "[" and depth < MAX_DEPTH:
            return (yield from self._pass_items(depth))
        if begins == '"':
            self._take()
            return (yield from self._pass_object())  # a JSON string, which ends as an object does
        return (yield from self._pass_scalar())

    def _pass_items(self, depth: int) -> Steps[bool]:
        yield from self._accept(_LIST)
        self._give_taken("[")
        yield from self._skip_space()
        first = True
        while not (yield from self._accept(_LIST_END)):
            if not first:
                if not (yield from self._accept(_COMMA)):
                    return False
                self._give_taken(", ")
            if not (yield from self._pass_value(depth + 1)):
                return False
            yield from self._skip_space()
            first = False
        self._give_taken("]")
        return True

    def _pass_text(self) -> Steps[bool]:
        """Pass on the text before the closing quote as a JSON string."""
        self._give_taken('"')

        def give(text: str) -> None:
            self._give_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

        if not (yield from self._pass_until(self.quote, give)):
            self.is_cut = True
            return False
        self._give_taken('"')
        return True

    def _pass_scalar(self) -> Steps[bool]:
        """Pass on a number, a word that JSON knows, or else text without quotes."""
        self._take()
        found = yield from self._find(_SCALAR_END)
        if not found:
            self.is_cut = True
            return False
        self._at -= len(found)
        text = self._unsettled.strip()
        self._give_taken(value_text(text, frozenset()) if text else "null")
        return True

    def _give_taken(self, text: str) -> None:
        """Settle what was read, and give this for it."""
        self._take()
        self._give_arguments(text)


class FunctionGemmaToolParser(GemmaToolParser):
    """FunctionGemma: ``<start_function_call>call:f{k:<escape>text<escape>}<end_function_call>``."""

    opening = Tag("<start_function_call>", line_breaks=1)
    closing = Tag("<end_function_call>")
    raw_end = Tag("<start_function_call>", "<end_function_call>")
    quote = Tag("<escape>")
