"""Tool calls of Gemma 4: ``<|tool_call>call:f{k:<|"|>text<|"|>,n:5,l:[1,2]}<tool_call|>``.

Keys are bare; strings are verbatim between special tokens; objects and lists may be nested. The arguments are
passed on as JSON while they arrive. FunctionGemma has other tokens.
"""

from __future__ import annotations

import json
import re

from engine.tool_parsers.call_object import CallObjectReader
from engine.tool_parsers.parameters import STRING, Types, ValueText, value_text
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.tagged_reader import TaggedReader

_NAME = re.compile(r"[^\s<>{}\[\]\"'=,()]*+")
_KEY = re.compile(r"[^<>{}\[\]()=,:\"]*+")
_CALL = Tag("call:")
_COLON = Tag(":")
_COMMA = Tag(",")
_ASSIGNS = Tag(":", "=")
_ENDS = {"{": "}", "[": "]", "(": ")"}
_BEGINS_ITEM = re.compile(r"[\w\"\[{+.-]")
MAX_DEPTH = 32
"""Maximum depth; deeper values are read as text."""

Path = tuple[str, ...]
"""The names that lead to a value: of a parameter, of members, ``item`` for an item of a list."""


class GemmaToolParser(TaggedReader, CallObjectReader):
    """Parses one response; the module's docstring defines a call."""

    opening = Tag("<|tool_call>", line_breaks=1)
    closing = Tag("<tool_call|>")
    raw_end = Tag("<|tool_call>", "<tool_call|>")
    quote = Tag('<|"|>')
    _function = ""

    def _opens_at_once(self) -> Steps[bool]:
        """Whether the response begins with a call of one of the tools without its opening tag."""
        yield from self._skip_space()
        length = self._length
        name = ""
        if (yield from self._accept(_CALL)):
            name = yield from self._read_word(_NAME)
        opens = name in self._tools and (yield from self._peek()) in ("{", "(")
        self._at = self._begin + length
        return opens

    def _read_calls(self) -> Steps[bool]:
        yield from self._skip_space()
        if (yield from self._peek()) == "{":
            return (yield from self._read_json())
        announced = (yield from self._accept(_CALL)) or (yield from self._accept(_COLON))
        yield from self._skip_space()
        name = yield from self._read_word(_NAME)
        yield from self._skip_space()
        begins = yield from self._peek()
        if not name or not (begins in ("{", "(") or (yield from self._has_no_arguments(name, announced))):
            return False
        self._function = name
        self._begin_call(name, "" if begins in ("{", "(") else "{}")
        if begins not in ("{", "(") or (yield from self._pass_members(begins, ())):
            yield from self._skip_closing()
        else:
            yield from self._leave_call()
        return True

    def _has_no_arguments(self, name: str, announced: str) -> Steps[bool]:
        """Whether the call ends after its name. The position does not change."""
        length = self._length
        ends = yield from self._accept(self.closing)
        self._at = self._begin + length
        return bool(ends) and bool(announced or name in self._tools)

    def _read_json(self) -> Steps[bool]:
        if not (yield from self._read_call_objects()):
            return False
        yield from self._skip_closing()
        return True

    def _leave_call(self) -> Steps[None]:
        """Passes on the rest of invalid arguments unchanged."""
        self._at = self._begin
        found = yield from self._pass_until(self.raw_end, self._give_stray)
        if not found:
            self.is_cut = True
        elif found in self.opening.texts:
            self._at = self._begin
        self._take()

    def _pass_members(self, begin: str, path: Path) -> Steps[bool]:
        """Passes on the object at this position as JSON; False if it is cut off or invalid."""
        self._at += 1
        self._give_taken("{")
        end = Tag(_ENDS[begin])
        first = True
        yield from self._skip_space()
        while not (yield from self._accept(end)):
            if not first:
                yield from self._accept(_COMMA)
                yield from self._skip_space()
                if (yield from self._accept(end)):
                    break
            key = yield from self._read_key()
            if key is None:
                return False
            self._give_taken(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            if not (yield from self._pass_value(begin, (*path, key))):
                return False
            yield from self._skip_space()
            first = False
        self._give_taken("}")
        return True

    def _read_key(self) -> Steps[str | None]:
        """Reads the key at this position and its colon; None if there is none."""
        if (yield from self._accept(self.quote)):
            key = yield from self._read_until(self.quote)
        elif (yield from self._peek()) == '"':
            key = yield from self._read_string()
        else:
            key = (yield from self._read_word(_KEY)).strip() or None
        yield from self._skip_space()
        return key if key is not None and (yield from self._accept(_ASSIGNS)) else None

    def _pass_value(self, inside: str, path: Path) -> Steps[bool]:
        """Passes on the value at this position as JSON; False if it is cut off or invalid. ``inside``: the
        bracket that opened the enclosing object or list."""
        yield from self._skip_space()
        if (yield from self._accept(self.quote)):
            return (yield from self._pass_text(inside, path))
        begins = yield from self._peek()
        if begins == "{" and len(path) < MAX_DEPTH:
            return (yield from self._pass_members(begins, path))
        if begins == "[" and len(path) < MAX_DEPTH:
            return (yield from self._pass_items(path))
        if begins == '"':
            self._take()
            return (yield from self._pass_object())  # a JSON string, which ends as an object does
        return (yield from self._pass_scalar(inside, path))

    def _pass_items(self, path: Path) -> Steps[bool]:
        self._at += 1
        self._give_taken("[")
        end = Tag("]")
        first = True
        yield from self._skip_space()
        while not (yield from self._accept(end)):
            if not first:
                if not (yield from self._accept(_COMMA)):
                    return False
                yield from self._skip_space()
                if (yield from self._accept(end)):
                    break
                self._give_taken(", ")
            if not (yield from self._pass_value("[", (*path, "item"))):
                return False
            yield from self._skip_space()
            first = False
        self._give_taken("]")
        return True

    def _pass_text(self, inside: str, path: Path) -> Steps[bool]:
        """Passes on the text before the closing quote as a JSON string. A quote belongs to the text if
        neither the end of the list or object nor another value follows it."""
        types = self._types(path)
        value = ValueText(types if types and "string" not in types else STRING)
        self._take()

        def give(text: str) -> None:
            self._give_arguments(value.add(text))

        give("")
        ends = Tag(*self.quote.texts, *self.raw_end.texts)
        while found := (yield from self._pass_until(ends, give)):
            if found not in self.quote.texts:
                break
            if (yield from self._closes(inside, len(path), ends)):
                self._give_taken(value.end())
                return True
            give('"')
            self._take()
        self.is_cut = not found
        self._give_arguments(value.held)
        self._at = self._begin
        return False

    def _closes(self, inside: str, depth: int, ends: Tag) -> Steps[bool]:
        """Whether a quote that has just been read closes its text: the last one of a call does. The position
        does not change."""
        length = self._length
        closes = yield from self._value_has_ended(inside, depth)
        self._at = self._begin + length
        return closes or (yield from self._look_ahead(ends)) not in self.quote.texts

    def _value_has_ended(self, inside: str, depth: int) -> Steps[bool]:
        yield from self._skip_space()
        follows = yield from self._peek()
        if not follows or (yield from self._accept(self.raw_end)):
            return True
        if follows == _ENDS[inside]:
            self._at += 1
            return depth > 1 or (yield from self._call_has_ended())
        comma = yield from self._accept(_COMMA)
        yield from self._skip_space()
        if comma and (yield from self._peek()) in ("", _ENDS[inside]):
            return True
        if inside == "[":
            return bool(comma) and (
                bool(_BEGINS_ITEM.match((yield from self._peek())))
                or bool((yield from self._accept(self.quote)))
            )
        if (yield from self._read_key()) is None:
            return False
        yield from self._skip_space()
        return bool(comma) or bool((yield from self._accept(self.quote)))

    def _call_has_ended(self) -> Steps[bool]:
        yield from self._skip_space()
        return not (yield from self._peek()) or bool((yield from self._accept(self.raw_end)))

    def _pass_scalar(self, inside: str, path: Path) -> Steps[bool]:
        """Passes on a number, a word of JSON, or else text without quotes."""
        self._take()
        found = yield from self._find(Tag(",", _ENDS[inside], "}", "]", *self.raw_end.texts))
        if not found:
            self.is_cut = True
            return False
        self._at -= len(found)
        text = self._unsettled.strip()
        types = self._types(path)
        is_text = not text and (not types or "string" in types)
        self._give_taken('""' if is_text else value_text(text, frozenset()) if text else "null")
        return True

    def _types(self, path: Path) -> Types | None:
        return self._tools.types_at(self._function, path)

    def _give_taken(self, text: str) -> None:
        """Settles what was read, and outputs this text for it."""
        self._take()
        self._give_arguments(text)


class FunctionGemmaToolParser(GemmaToolParser):
    """Parses calls of FunctionGemma:
    ``<start_function_call>call:f{k:<escape>text<escape>}<end_function_call>``."""

    opening = Tag("<start_function_call>", line_breaks=1)
    closing = Tag("<end_function_call>")
    raw_end = Tag("<start_function_call>", "<end_function_call>")
    quote = Tag("<escape>")
