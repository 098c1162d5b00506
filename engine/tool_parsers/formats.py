"""Selects the parser of a model's responses, by name or from the model's chat template.

This module does not know how responses are generated or sent on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError
from engine.reasoning.think import CallTags, ThinkSection, ThinkTags
from engine.tool_parsers.base import PlainParser, ReplyParser
from engine.tool_parsers.catalog import (
    REASONING_ALIASES,
    REASONING_PARSERS,
    THINK_TAGS,
    TOOL_ALIASES,
    TOOL_CALL_PARSERS,
    TOOL_FORMATS,
    ToolFormat,
    ToolParserFactory,
)
from engine.tool_parsers.forced import (
    JSON_CALLS,
    CallGrammar,
    CallSyntax,
    ReasoningSection,
    call_grammar,
    escaped,
    free_call_grammar,
)
from engine.tool_parsers.free_input import FreeInputParser
from engine.tool_parsers.free_texts import calls_of_texts, free_text_grammar
from engine.tool_parsers.json_calls import JsonToolParser
from engine.tool_parsers.messages.formats import MESSAGE_FORMATS, MessageFormat
from engine.tool_parsers.parameters import Tool
from engine.tool_parsers.sound_calls import SoundCalls

_plugin_formats: dict[str, ToolFormat] = {}
_loaded_plugins: set[Path] = set()


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How to parse the responses of one model. Chosen once; makes a parser for each response."""

    tool_format: ToolFormat | None
    """None if no known format of calls applies."""
    think_tags: ThinkTags | None
    """None if there is no reasoning section, or if messages replace it."""
    messages: MessageFormat | None
    """How to read a response of several messages; None if a response is a single message."""
    special_tokens: Mapping[str, int] | None
    """The tokenizer's special tokens with their ids; None if unknown."""

    @classmethod
    def choose(
        cls,
        tool_call_parser: str,
        reasoning_parser: str,
        chat_template: str | None,
        special_tokens: Mapping[str, int] | None = None,
    ) -> ReplyFormat:
        """Chooses a format by name, or with ``auto`` from the template; ConfigError if there is no parser
        with that name."""
        tool_name = _tool_format_name(tool_call_parser, chat_template or "")
        reasoning_name = _reasoning_name(reasoning_parser, chat_template or "")
        messages = MESSAGE_FORMATS.get(tool_name or "") or MESSAGE_FORMATS.get(reasoning_name or "")
        return cls(
            tool_format=None if tool_name is None else {**TOOL_FORMATS, **_plugin_formats}[tool_name],
            think_tags=THINK_TAGS.get(reasoning_name or ""),
            messages=messages,
            special_tokens=special_tokens,
        )

    @property
    def signs_of_calls(self) -> tuple[str, ...]:
        """Texts without which a response contains no call: the model may not write them if calls are not
        allowed."""
        if self.messages is not None:
            return self.messages.signs_of_calls
        return self.tool_format.tags if self.tool_format else ()

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the parsers must see special tokens, which a response's text usually omits."""
        tags = [*self.tool_format.tags, *self.tool_format.frame] if self.tool_format else []
        if self.messages is not None:
            tags += self.messages.tags
        if self.think_tags:
            tags += [self.think_tags.begin, self.think_tags.end]
        return bool(tags) if self.special_tokens is None else any(tag in self.special_tokens for tag in tags)

    def parser(
        self,
        tools: Sequence[Tool] | None,
        prompt_tail: str,
        *,
        calls_as_json: bool = False,
        input_of: tuple[str, str] | None = None,
    ) -> ReplyParser:
        """Returns the parser of one reply.

        Without tools no calls are parsed. ``prompt_tail`` is the end of the prompt's text, with special
        tokens: it may have begun a section of the reply. ``calls_as_json``: the reply was forced to be a JSON
        list of calls, whatever the model's own format. ``input_of``: function and parameter for which the
        whole reply was forced to be the text.
        """
        if input_of is not None:
            free = FreeInputParser(*input_of)
            return (
                free if self.think_tags is None else ThinkSection(self.think_tags, lambda: free, prompt_tail)
            )
        parser = self._format_parser(tools or (), prompt_tail, calls_as_json)
        return SoundCalls(parser) if tools else parser

    def _format_parser(self, tools: Sequence[Tool], prompt_tail: str, calls_as_json: bool) -> ReplyParser:
        if self.messages is not None and not calls_as_json:
            return self.messages.make(tools if self.tool_format else (), prompt_tail)

        def make_answer() -> ReplyParser:
            return self._answer_parser(tools, calls_as_json)

        if self.think_tags is None:
            return make_answer()
        own = None if calls_as_json or not tools else self.tool_format
        call_tags = CallTags() if own is None else CallTags(own.ends_thinking, own.begins_call)
        return ThinkSection(self.think_tags, make_answer, prompt_tail, call_tags)

    def _answer_parser(self, tools: Sequence[Tool], calls_as_json: bool) -> ReplyParser:
        """Returns the parser for the text after the reasoning."""
        make_plain = PlainParser if self.think_tags is None else self.think_tags.make_answer
        if not tools:
            return make_plain() if self.tool_format is None else self.tool_format.make_plain()
        if calls_as_json:
            return JsonToolParser(tools, listed=True)
        return make_plain() if self.tool_format is None else self.tool_format.make(tools)

    def forced_call_grammar(
        self, tools: Sequence[Tool], parallel: bool, prompt_tail: str
    ) -> CallGrammar | None:
        """A grammar of replies that call one of these tools (or several) in the model's own syntax.

        None if the format has no such syntax: then ``json_call_grammar`` is read with ``calls_as_json``.
        """
        syntax = self.tool_format.syntax if self.tool_format else None
        return None if syntax is None else self._grammar(syntax, tools, parallel, prompt_tail)

    def free_call_grammar(self, tools: Sequence[Tool], parallel: bool) -> CallGrammar | None:
        """A grammar of text that may contain calls of these tools, in the model's own syntax.

        None if the format has no grammar, or if no token shows that a call begins.
        """
        syntax = self.tool_format.syntax if self.tool_format else None
        if syntax is None:
            return None
        return free_call_grammar(syntax, tools, parallel, self.special_tokens or {})

    @property
    def enforces_texts(self) -> bool:
        """Whether a tool's one argument can follow a grammar even if the model may call no tool."""
        return self.tool_format is not None and self.tool_format.text_syntax is not None

    @property
    def text_end(self) -> str | None:
        """The text that follows such an argument."""
        syntax = self.tool_format.text_syntax if self.tool_format else None
        return syntax.line + syntax.value_end if syntax else None

    def free_text_grammar(
        self, tools: Sequence[Tool], parameters: Mapping[str, str], parallel: bool
    ) -> str | None:
        """A grammar of text that may contain calls of these tools: the argument of the function ``i`` of
        ``parameters`` follows ``@text_i``. None if the format does not write such arguments verbatim."""
        syntax = self.tool_format.text_syntax if self.tool_format else None
        if syntax is None:
            return None
        return free_text_grammar(syntax, tools, parameters, parallel, self.special_tokens or {})

    @property
    def ends_thinking(self) -> tuple[str, ...]:
        """Tags that only calls have; they end a reasoning section, too."""
        return self.tool_format.ends_thinking if self.tool_format else ()

    def calls_in_reasoning(self, texts: Collection[str] = ()) -> tuple[str, ...]:
        """Expressions for text that ends a reasoning section as a call, or that could be read there as a call
        of these functions, which have a single text argument."""
        syntax = self.tool_format.text_syntax if self.tool_format else None
        spelled = calls_of_texts(syntax, texts) if syntax and texts else ()
        return (*map(escaped, self.ends_thinking), *spelled)

    def json_call_grammar(self, tools: Sequence[Tool], parallel: bool, prompt_tail: str) -> CallGrammar:
        """Like ``forced_call_grammar``, for a JSON list of ``{"name": ..., "arguments": ...}``."""
        return self._grammar(JSON_CALLS, tools, parallel, prompt_tail)

    def _grammar(
        self, syntax: CallSyntax, tools: Sequence[Tool], parallel: bool, prompt_tail: str
    ) -> CallGrammar:
        reasoning = None
        if self.think_tags is not None:
            begun = self.think_tags.open_in(prompt_tail)
            if begun is not False:
                reasoning = ReasoningSection(
                    self.think_tags.begin, self.think_tags.end, begun or self.think_tags.assumed
                )
        return call_grammar(syntax, tools, parallel, reasoning, self.special_tokens or {})


def _tool_format_name(name: str, chat_template: str) -> str | None:
    if name == "none":
        return None
    if name == "auto":
        return next(
            (
                known
                for known, tool_format in TOOL_FORMATS.items()
                if tool_format.signs and all(sign in chat_template for sign in tool_format.signs)
            ),
            None,
        )
    name = TOOL_ALIASES.get(name, name)
    if name not in TOOL_FORMATS and name not in _plugin_formats:
        known = ", ".join([*TOOL_CALL_PARSERS, *_plugin_formats])
        raise ConfigError(f"tool_call_parser must be one of {known}, got {name!r}.")
    return name


def _reasoning_name(name: str, chat_template: str) -> str | None:
    if name == "none":
        return None
    if name == "auto":
        for known in MESSAGE_FORMATS:
            if all(sign in chat_template for sign in TOOL_FORMATS[known].signs):
                return known
        return next((known for known, tags in THINK_TAGS.items() if tags.end in chat_template), None)
    name = REASONING_ALIASES.get(name, name)
    if name not in THINK_TAGS and name not in MESSAGE_FORMATS:
        raise ConfigError(f"reasoning_parser must be one of {', '.join(REASONING_PARSERS)}, got {name!r}.")
    return name


def register_tool_parser(
    name: str, make: ToolParserFactory, *, needs_special_tokens: tuple[str, ...] = ()
) -> None:
    """Registers a plug-in: ``--tool-call-parser NAME`` then reads replies with the parser that
    ``make(tools)`` returns.

    ``make`` is called for each reply with the request's function tools (OpenAI's chat format). The parser has
    ``feed(text)`` and ``finish()``, which both return a list of ``ContentDelta`` and ``ToolCallDelta``; their
    sum must not depend on how the text was split. ``engine.tool_parsers.tagged_reader.TaggedReader`` helps
    with that. ``needs_special_tokens`` are the special tokens that the parser must see in the text.
    """
    _plugin_formats[name] = ToolFormat(make, tags=needs_special_tokens)


def load_plugin(path: str) -> None:
    """Runs a Python file that calls ``register_tool_parser``, once; ConfigError if that fails, or if the file
    does not call it."""
    file = Path(path).resolve()
    if file in _loaded_plugins:
        return
    num_before = len(_plugin_formats)
    try:
        spec = importlib.util.spec_from_file_location(f"tool_parser_plugin_{file.stem}", file)
        if spec is None or spec.loader is None:
            raise ImportError("it is not a Python file")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:  # any error of a plug-in
        said = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"tool_parser_plugin: cannot load {path!r}: {said}.") from error
    if len(_plugin_formats) == num_before:
        raise ConfigError(f"tool_parser_plugin: {path!r} does not call register_tool_parser.")
    _loaded_plugins.add(file)
