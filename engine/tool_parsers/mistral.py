"""Tool calls of Mistral's models, after ``[TOOL_CALLS]``: ``[{"name": ..., "arguments": {...}}]``,
``name{...}`` or ``name[ARGS]{...}``."""

from __future__ import annotations

import re
import secrets
import string

from engine.tool_parsers.call_object import FENCE, CallObjectReader
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.tagged_reader import TaggedReader

OPEN = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"

_ID_CHARS = string.ascii_letters + string.digits
_NAME = re.compile(r"[\w.\-/:]*+")
_CALL_ID = Tag(CALL_ID)
_ARGS = Tag(ARGS)


class MistralToolParser(TaggedReader, CallObjectReader):
    """Parses one response; the module's docstring defines a call."""

    opening = Tag(OPEN)
    raw_end = Tag(OPEN)

    def _read_calls(self) -> Steps[bool]:
        yield from self._skip_space()
        if (yield from self._peek()) in ("[", "{", "`"):
            if not (yield from self._read_call_objects()):
                return False
            yield from self._skip_closing()
            return True
        return (yield from self._read_named_call())

    def _read_named_call(self) -> Steps[bool]:
        name = yield from self._read_word(_NAME)
        if not name:
            return False
        yield from self._skip_space()
        if (yield from self._accept(_CALL_ID)):
            yield from self._read_word(_NAME)
        announced = yield from self._accept(_ARGS)
        yield from self._skip_space()
        if (yield from self._accept(FENCE)):
            yield from self._skip_space()
        if (yield from self._peek()) == "{":
            self._begin_call(name)
            yield from self._pass_object()
            yield from self._skip_closing()
            return True
        return (yield from self._read_other_arguments(name, announced=bool(announced)))

    def _read_other_arguments(self, name: str, *, announced: bool) -> Steps[bool]:
        """Handles that no object follows where arguments should be: there are none, or the model wrote other
        text."""
        length = self._length
        has_ended = self._at == len(self._text) or bool((yield from self._accept(self.opening)))
        self._at = self._begin + length
        if not announced and not (has_ended and name in self._tools):
            return False
        self._begin_call(name)
        if not has_ended:
            yield from self._pass_raw()
        return True

    def _new_id(self, name: str) -> str:
        """Returns an id of nine letters or digits, the only form that Mistral's chat templates accept."""
        return "".join(secrets.choice(_ID_CHARS) for _ in range(9))
