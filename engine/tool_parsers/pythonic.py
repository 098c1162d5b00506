"""Tool calls written in Python: ``[f(a=1), g(b="x")]``, as in Llama 3.2 and 4; Olmo 3 writes a call a line.

They follow ``<|python_start|>``; elsewhere they must name one of the tools. A call is certain at its first
``name=`` or its ``)``; each parameter is passed on when its value is complete. Some templates write strings
without quotes: a value that is not a literal is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from engine.tool_parsers.call_object import FENCE, FENCES
from engine.tool_parsers.parameters import STRING, ArgumentText, Tool, Types, value_text
from engine.tool_parsers.python_literal import LiteralScanner, literal_json
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.tagged_reader import TaggedReader

START = "<|python_start|>"
END = "<|python_end|>"

_LIST = Tag("[")
_LIST_END = Tag("]")
_OPEN = Tag("(")
_CLOSE = Tag(")")
_EQUALS = Tag("=")
_COMMA = Tag(",")
_FENCE_END = Tag("```")
_LFM_END = "<|tool_call_end|>"
_NOTHING = "nothing"
"""Written in place of an empty value; deliberately not a JSON literal."""

_FUNCTION = re.compile(r"[\w.\-]*+")
_ESCAPED = re.compile(r"\\.|['\"]", re.DOTALL)
_PARAMETER = re.compile(r"\w*+")


class PythonicToolParser(TaggedReader):
    """Parses one response; the module's docstring defines a call."""

    opening = Tag(START, "[", *(fence + "[" for fence in FENCES), line_breaks=2)
    closing = Tag(END)
    start = START
    """The text that announces a list of calls."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._function = ""
        self._arguments = ArgumentText()
        self._announced = False

    def _opens_at_once(self) -> Steps[bool]:
        yield from self._skip_space()
        return (yield from self._peek()) == "["

    def _read_calls(self) -> Steps[bool]:
        self._announced = self._unsettled.endswith(self.start)
        if self._unsettled.endswith("["):
            self._at -= 1
        yield from self._skip_space()
        if self._announced and (yield from self._accept(FENCE)):
            yield from self._skip_space()
        if not (yield from self._accept(_LIST)) or not (yield from self._read_call()):
            return False
        more = True
        while more:
            more = yield from self._read_next_call()
        yield from self._skip_layout(_LIST_END, _FENCE_END)
        yield from self._skip_closing()
        return True

    def _read_next_call(self) -> Steps[bool]:
        """Reads a comma and the next call after a call; False if there is none."""
        self._take()
        yield from self._skip_space()
        if (yield from self._accept(_COMMA)):
            if (yield from self._read_call()):
                return True
            yield from self._skip_last_comma()
        self._at = self._begin
        return False

    def _skip_last_comma(self) -> Steps[None]:
        """Settles a comma after the last call of the list."""
        self._at = self._begin
        yield from self._skip_space()
        yield from self._accept(_COMMA)
        yield from self._skip_space()
        if (yield from self._peek()) == "]":
            self._take()

    def _read_call(self) -> Steps[bool]:
        yield from self._skip_space()
        function = yield from self._read_word(_FUNCTION)
        if not function[:1].isidentifier() or not (yield from self._accept(_OPEN)):
            return False
        if not self._announced and function not in self._tools:
            return False
        yield from self._skip_space()
        if (yield from self._accept(_CLOSE)):
            self._begin_call(function, "{}")
            return True
        name = yield from self._read_name()
        if not name:
            return False
        self._function = function
        self._arguments = ArgumentText()
        self._begin_call(function)
        while name:
            name = yield from self._read_argument(name)
        return True

    def _read_name(self) -> Steps[str]:
        """Reads a parameter's name and ``=``; empty if there is none."""
        yield from self._skip_space()
        name = yield from self._read_word(_PARAMETER)
        yield from self._skip_space()
        return name if name.isidentifier() and (yield from self._accept(_EQUALS)) else ""

    def _read_argument(self, name: str) -> Steps[str]:
        """Reads a parameter's value and returns the next parameter's name, empty after the last."""
        text = yield from self._read_literal()
        if text is None:
            self._give_arguments(self._arguments.key(name) + self._unsettled)
            self._take()
            self.is_cut = True
            return ""
        if not text.strip():  # an empty value: no text is as good as another
            self._give_arguments(self._arguments.key(name) + _NOTHING)
            yield from self._end_call()
            return ""
        value = _value_json(text, self._tools.types(self._function, name))
        self._give_arguments(self._arguments.key(name) + value)
        self._take()
        following = ""
        if (yield from self._accept(_COMMA)):
            following = yield from self._read_name()
        if not following:
            yield from self._end_call()
        return following

    def _end_call(self) -> Steps[None]:
        """Ends the call after the last parameter. If the response has ended, the call is left incomplete."""
        yield from self._skip_space()
        if self._at == len(self._text):
            self._take()
            self.is_cut = True
            return
        closed = yield from self._accept(_CLOSE)
        self._give_arguments(self._arguments.end())
        if not closed and (yield from self._peek()) != "]":
            yield from self._pass_unnamed()
        self._take()

    def _pass_unnamed(self) -> Steps[None]:
        """Passes on text that is not a named argument, unchanged, up to the call's end."""
        self._at = self._begin
        found = yield from self._pass_until(Tag(")", *self.closing.texts), self._give_stray)
        self._at -= 0 if found == ")" else len(found)

    def _read_literal(self) -> Steps[str | None]:
        """Reads up to the end of an argument and returns the text; None, with all read, if it has no end."""
        offset = self._length
        scanner = LiteralScanner(is_last=self._ended)
        while True:
            self._at = scanner.scan(self._text, self._at)
            if scanner.ended:
                return self._text[self._begin + offset : self._at]
            if scanner.is_last:
                self._at = len(self._text)
                return None
            yield from self._more()
            scanner.is_last = self._ended


def _value_json(text: str, types: Types | None) -> str:
    """The JSON text of a value; if its Python type differs from the schema's, the schema has precedence."""
    text = text.strip()
    literal = literal_json(text) or _loosely_quoted(text)
    if literal is None:
        return value_text(text, types or STRING)
    is_string = literal.startswith('"')
    if types == STRING and not is_string:
        return json.dumps(text, ensure_ascii=False)
    if types and is_string and "string" not in types:
        return value_text(json.loads(literal), types)
    return literal


def _loosely_quoted(text: str) -> str | None:
    """The JSON string of a text in quotes that contains such quotes itself; None if it is not such a text."""
    quote = text[:1]
    if len(text) < 2 or quote not in ("'", '"') or not text.endswith(quote):
        return None
    inner = _ESCAPED.sub(lambda found: f"\\{quote}" if found.group() == quote else found.group(), text[1:-1])
    return literal_json(quote + inner + quote)


class LfmToolParser(PythonicToolParser):
    """Parses calls of LFM2: the list is between special tokens. The model sometimes repeats the list after
    them; the repetition is skipped."""

    start = "<|tool_call_start|>"
    opening = Tag(start, "[", *(fence + "[" for fence in FENCES), line_breaks=2)
    closing = Tag("<|tool_call_end|>")
    _written = ""
    """The text of the list that is being read."""

    def _take(self) -> None:
        self._written += self._unsettled
        super()._take()

    def _read_calls(self) -> Steps[bool]:
        self._written = ""
        if not (yield from super()._read_calls()):
            return False
        if self._announced:
            yield from self._skip_echo(self._written.split(self.start, 1)[-1].split(_LFM_END)[0].strip())
        return True

    def _skip_echo(self, written: str) -> Steps[None]:
        """Moves past a repetition of the same list, and its end."""
        yield from self._skip_space()
        if written and (yield from self._accept(Tag(written))):
            yield from self._skip_layout(self.closing)
        self._at = self._begin


class OlmoToolParser(PythonicToolParser):
    """Parses calls of Olmo 3: ``<function_calls>f(a=1)``, a call a line, with values in JSON or in Python."""

    start = "<function_calls>"
    opening = Tag(start)
    closing = Tag("</function_calls>")

    def _opens_at_once(self) -> Steps[bool]:
        yield from ()
        return False

    def _read_calls(self) -> Steps[bool]:
        self._announced = True
        yield from self._skip_space()
        if (yield from self._accept(FENCE)):
            yield from self._skip_space()
        yield from self._accept(_LIST)
        if not (yield from self._read_call()):
            return False
        while (yield from self._read_next_call()):
            pass
        yield from self._skip_layout(_LIST_END, _FENCE_END)
        yield from self._skip_closing()
        return True

    def _read_next_call(self) -> Steps[bool]:
        self._take()
        yield from self._skip_space()
        yield from self._accept(_COMMA)
        if (yield from self._read_call()):
            return True
        self._at = self._begin
        return False
