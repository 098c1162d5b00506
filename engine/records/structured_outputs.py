"""The constraint that a request puts on its output, as the client sent it. It does not know the grammar
library."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from engine.errors import RequestError

MAX_GRAMMAR_BYTES = 512 * 1024
"""Maximum bytes of a schema, an expression or a grammar; the tools of an agent with many servers take a fifth
of it."""
MAX_CHOICES = 4096

_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class ReasoningSpan(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """The reasoning that may come before the constrained part: any text up to ``end``."""

    end: str
    start: str | None = None
    """Opens the reasoning, which is then optional; None if the prompt has opened it already."""
    without: tuple[str, ...] = ()
    """Expressions that the text must not match anywhere."""
    may_be_left: bool = False
    """Whether the constrained part may also begin without ``end``."""


class ThinkingLimit(msgspec.Struct, array_like=True, frozen=True):
    """The maximum number of reasoning tokens, and the tokens around reasoning."""

    num_tokens: int
    end: int
    start: int | None
    """The token that opens reasoning; None if the prompt has opened it already."""


class ToolArguments(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """The JSON schema of a tool's arguments."""

    tool: str
    schema: str
    strict: bool = False
    """Whether a part of the schema that cannot be enforced is an error; else it is omitted."""


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """The constraint: exactly one of ``json``, ``json_object``, ``regex``, ``choice``, ``grammar`` and
    ``structural_tag``; the names are V1's."""

    json: dict[str, Any] | str | None = None
    """A JSON schema, as an object or as its text."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """The whole output matches this. Rust's syntax: no look-around and no back-references."""
    choice: list[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A context-free grammar in llguidance's Lark, or in llama.cpp's GBNF."""
    structural_tag: dict[str, Any] | str | None = None
    """A format of text and tags as XGrammar describes it, as an object or as its text."""

    disable_any_whitespace: bool = False
    """Write JSON without spaces or line breaks between its parts."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between the parts of JSON; up to 64 blanks by default."""
    lenient: bool = False
    """Ignore the keywords of a schema that cannot be enforced, instead of refusing them."""

    reasoning: ReasoningSpan | None = None
    """The reasoning that may come before the constrained part."""
    calls: str | None = None
    """A Lark grammar of tool calls, which may replace the constrained part."""
    arguments: list[ToolArguments] | None = None
    """The rules ``arguments_0`` and so on that the grammar of tool calls refers to."""
    texts: list[str | None] | None = None
    """Grammars in Lark that ``grammar`` refers to as ``@text_0 text_end`` and so on. None: any text up to its
    end, which is ``grammar``'s rule ``value``."""
    text_end: str | None = None
    """The text that follows each of the texts."""
    asked_in: str | None = None
    """The client's name of the field that holds the constraint, for errors."""

    @property
    def kind(self) -> str:
        """The name of the field that is set, after ``verify``."""
        return self._kinds()[0]

    @property
    def field(self) -> str:
        """The request's field to name in an error about this."""
        if self.asked_in is not None:
            return self.asked_in
        kinds = self._kinds()
        return f"structured_outputs.{kinds[0]}" if len(kinds) == 1 else "structured_outputs"

    def _kinds(self) -> list[str]:
        return [kind for kind in _KINDS if getattr(self, kind) is not None]

    def verify(self) -> None:
        """Raises RequestError for errors that are found without compiling it."""
        kinds = self._kinds()
        if len(kinds) != 1:
            given = " and ".join(kinds) or "none"
            raise RequestError(
                f"{self.field} takes exactly one of {', '.join(_KINDS)}, got {given}.", self.field
            )
        if self.json_object is False:
            raise RequestError(f"{self.field} can only be true; leave it out otherwise.", self.field)
        if self.choice is not None:
            self._verify_choice(self.choice)
        if not {"json", "json_object", "structural_tag"} & set(kinds):
            for option in ("disable_any_whitespace", "whitespace_pattern", "lenient"):
                if getattr(self, option):
                    raise RequestError(f"{option} is for json only, not for {kinds[0]}.", self.field)
        try:
            num_bytes = sum(len(text.encode()) for text in self._texts())
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{self.field} holds half of a surrogate pair, which is not a character.", self.field
            ) from error
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"{self.field} has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are taken.", self.field
            )

    def _verify_choice(self, choice: list[str]) -> None:
        if not 0 < len(choice) <= MAX_CHOICES:
            raise RequestError(f"{self.field} takes 1 to {MAX_CHOICES} texts, got {len(choice)}.", self.field)
        if not all(choice):
            raise RequestError(f"{self.field} must not hold an empty text.", self.field)

    def _texts(self) -> list[str]:
        """All texts in it whose lengths are limited."""
        schemas = [arguments.schema for arguments in self.arguments or ()]
        if self.json is not None:
            schemas.append(self.schema_text())
        if self.structural_tag is not None:
            schemas.append(self.tag_text())
        texts = [self.regex, self.grammar, self.calls, self.whitespace_pattern]
        texts += [*(self.choice or ()), *schemas, *filter(None, self.texts or ())]
        return [text for text in texts if text is not None]

    def in_texts(self) -> StructuredOutputsParams:
        """Returns the parameters with the schema as text: not all of its numbers could be sent to other
        processes."""
        if self.structural_tag is not None:
            return msgspec.structs.replace(self, structural_tag=self.tag_text())
        return self if self.json is None else msgspec.structs.replace(self, json=self.schema_text())

    def schema_text(self) -> str:
        """The JSON schema as text; RequestError if it is not JSON."""
        return self._as_text(self.json)

    def tag_text(self) -> str:
        """The structural tag as text; RequestError if it is not JSON."""
        return self._as_text(self.structural_tag)

    def tag_object(self) -> Any:
        """The structural tag as parsed JSON; RequestError if it is not JSON."""
        try:
            return json.loads(self.tag_text())
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{self.field} is not valid JSON: {error}.", self.field) from error

    def _as_text(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        try:
            return json.dumps(value, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{self.field} cannot be written as JSON: {error}.", self.field) from error
