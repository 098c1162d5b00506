"""Grammars of responses that must call a tool, in the syntax the model was trained on (llguidance's Lark).

This module does not know how a grammar is enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.tool_parsers.parameters import Tool

_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as chat templates write it, so that a response that is sent back is rendered to its own tokens."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a format writes calls whose arguments are a JSON object."""

    before: str
    """The text before the arguments; ``{name}`` stands for the function's name, ``{number}`` for any
    number."""
    after: str
    begin: str = ""
    between: str = ""
    end: str = ""


JSON_CALLS = CallSyntax('{"name": "{name}", "arguments": ', "}", begin="[", between=", ", end="]")
"""No model's own syntax: used to force calls if the model's format has no grammar."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A function's parameters: the grammar's rules ``arguments_0``, ``arguments_1`` and so on, in this
    order."""

    function: str
    schema: str
    strict: bool
    """Whether a part of the schema that cannot be enforced is an error; else the tool must check it."""


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """A grammar whose rules for arguments are given by their schemas."""

    rules: str
    arguments: list[Arguments]


@dataclass(frozen=True, slots=True)
class ReasoningSection:
    """A reasoning section that may come before the calls."""

    begin: str
    end: str
    begun: bool
    """Whether the response begins inside it."""


def call_grammar(
    syntax: CallSyntax,
    tools: Sequence[Tool],
    parallel: bool,
    reasoning: ReasoningSection | None,
    special_tokens: Mapping[str, int],
    *,
    spelled: bool = False,
) -> CallGrammar:
    """A grammar of one call or, with ``parallel``, one or more calls of these tools, and only reasoning
    besides.

    ``spelled``: special tokens may also be written as text.
    """
    literal = Literals(special_tokens, spelled)
    functions = [tool.get("function", tool) for tool in tools]
    between = literal(syntax.between)
    several = f"({between} call)* " if parallel else ""
    lines = [
        f"start: {_reasoning_start(reasoning)} calls",
        f"calls: {literal(syntax.begin)} call {several}{literal(syntax.end)}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
    ]
    for index, function in enumerate(functions):
        name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
        texts = syntax.before.replace("{name}", name).split("{number}")
        before = " /[0-9]{1,3}/ ".join(map(literal, texts))
        after = literal(syntax.after)
        lines.append(f"call_{index}: {before} arguments_{index} {after}")
    rules = "\n".join([*lines, *_reasoning_rules(reasoning, literal)]) + "\n"
    return CallGrammar(rules, [_arguments_of(function) for function in functions])


def free_call_grammar(
    syntax: CallSyntax, tools: Sequence[Tool], parallel: bool, special_tokens: Mapping[str, int]
) -> CallGrammar | None:
    """A grammar of text that may contain calls. None if not every call begins with a special token.

    A model may also write its tokens as text: both are parsed as a call, so both are allowed here.
    """
    opening = opening_token(syntax, special_tokens)
    if opening is None:
        return None
    several = parallel and not syntax.begin
    inside = replace(
        syntax, before=syntax.before.removeprefix(opening), begin=syntax.begin.removeprefix(opening)
    )
    calls = call_grammar(inside, tools, parallel and not several, None, special_tokens, spelled=True)
    rules = [
        f"start: opened{'*' if several else '?'} TEXT?",
        f"opened: (TEXT? <[{special_tokens[opening]}]> | spelled) calls",
        f"TEXT: /(?s:.+)/ & {without([escaped(opening)])}",
        f"spelled[lazy]: /(?s:.*){escaped(opening)}/",
        *calls.rules.splitlines()[1:],
    ]
    return replace(calls, rules="\n".join(rules) + "\n")


def escaped(text: str) -> str:
    """Escapes a text for use in an expression between slashes."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def without(expressions: Sequence[str]) -> str:
    """An expression for texts that contain none of these expressions."""
    return f"~/(?s:.*)({'|'.join(expressions)})(?s:.*)/"


def opening_token(syntax: CallSyntax, special_tokens: Mapping[str, int]) -> str | None:
    """The token that begins every call of this syntax; None if a call begins with text."""
    begin = syntax.begin or syntax.before
    return next((token for token in special_tokens if begin.startswith(token)), None)


def _arguments_of(function: Mapping[str, Any]) -> Arguments:
    strict = bool(function.get("strict"))
    options = {**_JSON_OPTIONS, "lenient": not strict, "coerce_one_of": not strict}
    schema = {**(function.get("parameters") or {}), "type": "object", "x-guidance": options}
    return Arguments(function["name"], json.dumps(schema), strict)


def _reasoning_start(reasoning: ReasoningSection | None) -> str:
    if reasoning is None:
        return ""
    return "reasoning" if reasoning.begun else "(think_begin reasoning)?"


def _reasoning_rules(reasoning: ReasoningSection | None, literal: Literals) -> list[str]:
    if reasoning is None:
        return []
    rules = [] if reasoning.begun else [f"think_begin: {literal(reasoning.begin)}"]
    if reasoning.end in literal.special_tokens:
        return [*rules, f"reasoning: /(.|\\n)*/ {literal(reasoning.end)} /\\s*/"]
    return [
        *rules,
        "reasoning: reasoning_text /\\s*/",
        f"reasoning_text[suffix={json.dumps(reasoning.end)}]: /(.|\\n)*/",
    ]


class Literals:
    """Converts texts to grammar terms: special tokens by their number, since no text can spell them."""

    def __init__(self, special_tokens: Mapping[str, int], spelled: bool) -> None:
        self.special_tokens = special_tokens
        self._spelled = spelled
        self._pattern = (
            re.compile("(" + "|".join(map(re.escape, special_tokens)) + ")") if special_tokens else None
        )

    def __call__(self, text: str) -> str:
        return " ".join(map(self._term, self.pieces(text)))

    def pieces(self, text: str) -> list[str]:
        """Splits a text at its special tokens."""
        pieces = self._pattern.split(text) if self._pattern else [text]
        return [piece for piece in pieces if piece]

    def at_token(self, text: str) -> tuple[str, str, str]:
        """Returns the text before its first special token, the term of that token alone, and the text after
        it; the last two are empty if there is none."""
        before, token, after = (*(self._pattern.split(text, 1) if self._pattern else [text]), "", "")[:3]
        return before, f"<[{self.special_tokens[token]}]>" if token else "", after

    def _term(self, piece: str) -> str:
        text = json.dumps(piece, ensure_ascii=False)
        if piece not in self.special_tokens:
            return text
        token = f"<[{self.special_tokens[piece]}]>"
        return f"({token} | {text})" if self._spelled else token
