"""Writes the text of a grammar in llguidance's syntax. It knows tokens only by their names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from engine.errors import RequestError
from engine.records.structured_outputs import ReasoningSpan, StructuredOutputsParams
from engine.structured_output.structural_tag import structural_tag_grammar
from engine.tool_parsers.forced import escaped, without

TokenIds = Mapping[str, int]
"""Ids of the texts that are single tokens."""

WHITESPACE = r"[ \t\n\r]{0,64}"
"""The white space between the parts of JSON. Bounded: a model that keeps writing blanks would continue until
the length limit."""

_OPTIONS = '%llguidance {"no_forcing": true}'
"""Without this option, if only one text can follow, the library would allow only the tokens that the
tokenizer makes of it. For ``<tool_call>`` that is an added token, which it then refuses, because such a token
is not text."""

_AFTER_REASONING = r"/[ \t\n\r]{0,8}/"


def grammar_text(params: StructuredOutputsParams, token_ids: TokenIds) -> str:
    """Returns the grammar of a request; RequestError if even its text is invalid."""
    grammars = _tagged(params, token_ids) if params.kind == "structural_tag" else [_answer(params)]
    grammars[0]["name"] = "answer"
    if params.calls is not None:
        grammars.append({"name": "calls", "lark_grammar": params.calls + _arguments(params)})
    for number, text in enumerate(params.texts or ()):
        if text is not None:
            grammars.append({"name": f"text_{number}", "lark_grammar": _as_lark(text, params.field)})
    return json.dumps({"grammars": [{"name": "reply", "lark_grammar": _reply(params, token_ids)}, *grammars]})


def _reply(params: StructuredOutputsParams, token_ids: TokenIds) -> str:
    answer = "@answer" if params.calls is None else "(@calls | @answer)"
    reasoning, rules = ("", "") if params.reasoning is None else _reasoning(params.reasoning, token_ids)
    return f"{_OPTIONS}\nstart: {reasoning} {answer}\n{rules}"


def _answer(params: StructuredOutputsParams) -> dict[str, Any]:
    match params.kind:
        case "json":
            return _json_grammar(params, params.schema_text())
        case "json_object":
            return _json_grammar(params, '{"type": "object"}')
        case "regex":
            assert params.regex is not None
            return _only_part(LLMatcher.grammar_from_regex(params.regex))
        case "choice":
            # A terminal, because a rule with this many alternatives would be too wide for the
            # library.
            texts = " | ".join(quoted(text) for text in params.choice or ())
            return {"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}
        case _:
            return {"lark_grammar": _lark(params)}


def _tagged(params: StructuredOutputsParams, token_ids: TokenIds) -> list[dict[str, Any]]:
    """Returns the grammar of a structural tag, and those that it refers to."""
    inner: list[dict[str, Any]] = []

    def write(kind: str, source: Any) -> str:
        match kind:
            case "json_schema":
                grammar = _json_grammar(params, json.dumps(source))
            case "regex":
                grammar = _only_part(LLMatcher.grammar_from_regex(source))
            case _:
                grammar = {"lark_grammar": _as_lark(source, params.field)}
        inner.append({"name": f"inner_{len(inner)}", **grammar})
        return f"@{inner[-1]['name']}"

    grammar = structural_tag_grammar(params.tag_object(), params.field, token_ids, write)
    return [{"lark_grammar": grammar}, *inner]


def _arguments(params: StructuredOutputsParams) -> str:
    """The rules for the arguments of tools."""
    rules = (f"arguments_{i}: %json {each.schema}\n" for i, each in enumerate(params.arguments or ()))
    return "".join(rules)


def quoted(text: str) -> str:
    """Writes a text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _json_grammar(params: StructuredOutputsParams, schema: str) -> dict[str, Any]:
    options: dict[str, Any] = {"lenient": params.lenient, "coerce_one_of": params.lenient}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = params.whitespace_pattern or WHITESPACE
    try:
        # The library's own type for options does not allow a dict that is built here.
        return _only_part(LLMatcher.grammar_from_json_schema(schema, options))  # type: ignore[arg-type]
    except ValueError as error:
        raise RequestError(f"{params.field} is not a valid JSON schema: {error}.", params.field) from error


def _only_part(grammar: str) -> dict[str, Any]:
    """The single grammar in a text that the library made, without its name."""
    (part,) = json.loads(grammar)["grammars"]
    return {key: value for key, value in part.items() if key != "name" and value is not None}


def _lark(params: StructuredOutputsParams) -> str:
    assert params.grammar is not None
    # Calls get a separate grammar if they are an alternative to something else.
    rules = params.grammar + (_arguments(params) if params.calls is None else "")
    for number, text in enumerate(params.texts or ()):
        if text is None:
            rules = rules.replace(f"@text_{number} text_end", "value")
    return _as_lark(rules, params.field)


def _as_lark(grammar: str, field: str) -> str:
    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # of many types, as the converter is a parser itself
        raise RequestError(f"{field} is not a valid grammar: {error}.", field) from error


def _reasoning(reasoning: ReasoningSpan, token_ids: TokenIds) -> tuple[str, str]:
    """Returns how reasoning appears in a rule, and the rules it needs. A tag that is a single token can only
    appear as that token."""
    end = token_ids.get(reasoning.end)
    optional = "?" if reasoning.may_be_left else ""
    unlike = f" & {without(reasoning.without)}" if reasoning.without else ""
    if end is not None:
        rules = f"reasoning: THOUGHTS? <[{end}]> {_AFTER_REASONING}\nTHOUGHTS: /(?s:.+)/{unlike}\n"
    else:
        thoughts = f"/(?s:.*){escaped(reasoning.end)}/{unlike}"
        rules = f"reasoning: thoughts {_AFTER_REASONING}\nthoughts[lazy]: {thoughts}\n"
    if reasoning.start is None:
        return f"reasoning{optional}", rules
    start = token_ids.get(reasoning.start)
    opening = quoted(reasoning.start) if start is None else f"<[{start}]>"
    return f"({opening} reasoning{optional})?", rules
