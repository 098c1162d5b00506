"""The grammar of a chat response: an output format, tool calls, or either; reasoning may come first.

It does not know APIs or how a grammar is enforced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from engine.errors import RequestError
from engine.records.structured_outputs import ReasoningSpan, StructuredOutputsParams, ToolArguments
from engine.tool_parsers.forced import CallGrammar
from engine.tool_parsers.formats import ReplyFormat
from engine.tool_parsers.parameters import Tool


@dataclass(frozen=True, slots=True)
class ReplyGrammar:
    """The constraint of a response, and how to parse the response."""

    params: StructuredOutputsParams
    calls_as_json: bool = False
    """Whether its calls are a JSON list, because the model's own syntax for them cannot be forced."""
    texts_asked_in: tuple[str, ...] = ()
    """The request field of each of ``params.texts``."""


class TextArgument(Protocol):
    """A function's only argument, which is text."""

    @property
    def parameter(self) -> str: ...

    @property
    def grammar(self) -> str:
        """The text's grammar in Lark."""

    @property
    def asked_in(self) -> str:
        """The request field that holds the grammar."""


@dataclass(frozen=True, slots=True)
class ReplyStart:
    """The point at which a response begins, and the format of the model."""

    reply_format: ReplyFormat
    added_tokens: Mapping[str, int]
    """The tokenizer's added tokens: a text that is a single token appears as that token, as when the response
    is tokenized again."""
    prompt_tail: str
    """The end of the prompt's text."""


def forced_calls(tools: Sequence[Tool], name: str | None, parallel: bool, start: ReplyStart) -> ReplyGrammar:
    """A response that calls one of the tools, or the one named ``name``, and contains nothing else.

    RequestError if there is no such tool.
    """
    chosen = _callable(tools, name)
    # A named tool is called once.
    grammar, as_json = _call_grammar(chosen, parallel and name is None, start.reply_format, start)
    params = StructuredOutputsParams(grammar=grammar.rules, arguments=_schemas(grammar), asked_in="tools")
    return ReplyGrammar(params, calls_as_json=as_json)


def free_calls(tools: Sequence[Tool], parallel: bool, start: ReplyStart) -> ReplyGrammar | None:
    """A response of text and calls, chosen by the model, whose calls follow the tools' schemas.

    None if that is impossible: the model's calls are not JSON, or do not begin with a special token.
    """
    in_tokens = replace(start.reply_format, special_tokens=start.added_tokens)
    grammar = in_tokens.free_call_grammar(tools, parallel)
    if grammar is None:
        return None
    reasoning = _reasoning_before_calls(start)
    return ReplyGrammar(
        StructuredOutputsParams(
            grammar=grammar.rules, arguments=_schemas(grammar), reasoning=reasoning, asked_in="tools"
        )
    )


def free_texts(
    tools: Sequence[Tool], texts: Mapping[str, TextArgument], parallel: bool, start: ReplyStart
) -> ReplyGrammar | None:
    """A response of text and calls, chosen by the model, where the one argument of each of these functions
    follows its grammar. None if the model does not write such arguments verbatim."""
    in_tokens = replace(start.reply_format, special_tokens=start.added_tokens)
    parameters = {name: text.parameter for name, text in texts.items()}
    rules = in_tokens.free_text_grammar(tools, parameters, parallel)
    if rules is None:
        return None
    asked_in = next(iter(texts.values())).asked_in if len(texts) == 1 else "tools"
    grammars = [text.grammar for text in texts.values()]
    params = StructuredOutputsParams(
        grammar=rules,
        texts=[*grammars],
        text_end=in_tokens.text_end,
        reasoning=_reasoning_before_calls(start, parameters),
        asked_in=asked_in,
    )
    return ReplyGrammar(params, texts_asked_in=tuple(text.asked_in for text in texts.values()))


def forced_input(grammar: str, asked_in: str, start: ReplyStart) -> ReplyGrammar:
    """A response that is only a text of this grammar, the argument of a tool."""
    return ReplyGrammar(
        StructuredOutputsParams(grammar=grammar, asked_in=asked_in, reasoning=reasoning_before(start))
    )


def requested_format(
    asked: StructuredOutputsParams, tools: Sequence[Tool], parallel: bool, start: ReplyStart
) -> ReplyGrammar:
    """A response in the requested output format. With tools, it may instead be calls of them, unless
    structural tags define where calls are."""
    reasoning = reasoning_before(start)
    if not tools or asked.structural_tag is not None:
        return ReplyGrammar(msgspec.structs.replace(asked, reasoning=reasoning))
    unthinking = replace(start.reply_format, think_tags=None)
    calls, as_json = _call_grammar(_callable(tools, None), parallel, unthinking, start)
    params = msgspec.structs.replace(asked, reasoning=reasoning, calls=calls.rules, arguments=_schemas(calls))
    return ReplyGrammar(params, calls_as_json=as_json)


def _call_grammar(
    tools: Sequence[Tool], parallel: bool, reply_format: ReplyFormat, start: ReplyStart
) -> tuple[CallGrammar, bool]:
    """Returns a grammar of calls, and whether they are a JSON list."""
    in_tokens = replace(reply_format, special_tokens=start.added_tokens)
    own = in_tokens.forced_call_grammar(tools, parallel, start.prompt_tail)
    if own is not None:
        return own, False
    return in_tokens.json_call_grammar(tools, parallel, start.prompt_tail), True


def _schemas(grammar: CallGrammar) -> list[ToolArguments]:
    return [ToolArguments(each.function, each.schema, each.strict) for each in grammar.arguments]


def reasoning_before(start: ReplyStart) -> ReasoningSpan | None:
    """The reasoning that may come before the answer; None if there is none."""
    tags = start.reply_format.think_tags
    if tags is None:
        return None
    begun = tags.open_in(start.prompt_tail)
    if begun is False:
        return None
    return ReasoningSpan(tags.end, None if begun or tags.assumed else tags.begin)


def _reasoning_before_calls(start: ReplyStart, texts: Collection[str] = ()) -> ReasoningSpan | None:
    """The same reasoning, but without text that would be read as a call although it follows no grammar.
    ``texts``: functions whose argument follows a grammar."""
    reasoning = reasoning_before(start)
    reply_format = start.reply_format
    if reasoning is None:
        return None
    left = bool(reply_format.ends_thinking)
    return msgspec.structs.replace(
        reasoning, without=reply_format.calls_in_reasoning(texts), may_be_left=left
    )


def text_before_stops(start: ReplyStart) -> ReasoningSpan | None:
    """The text that comes before the part to which a client's stop strings apply."""
    messages = start.reply_format.messages
    if messages is not None:
        return None if messages.answer in start.prompt_tail else ReasoningSpan(messages.answer)
    return reasoning_before(start)


def _callable(tools: Sequence[Tool], name: str | None) -> list[Tool]:
    """The tools to choose from."""
    chosen = [tool for tool in tools if name is None or tool["function"]["name"] == name]
    if not chosen:
        wanted = "a tool" if name is None else f"the tool {name[:100]!r}"
        raise RequestError(f"tool_choice needs {wanted}, which is not in tools.", "tool_choice")
    return chosen
