"""Forced calls in every format: a model with random weights writes them, the format's parser reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import pytest

from engine.frontend.llm import LLM
from engine.reasoning.think import ThinkTags
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from engine.structured_output.reply_grammar import ReplyGrammar, ReplyStart, forced_calls, requested_format
from engine.tool_parsers import ParsedReply, read_reply
from engine.tool_parsers.base import ReadCall
from engine.tool_parsers.catalog import TOOL_FORMATS
from engine.tool_parsers.formats import ReplyFormat

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {
                "properties": {
                    "colour": {"enum": ["red", "<b>", 'say "x"']},
                    "layers": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
                },
                "required": ["colour"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "stop", "parameters": {"type": "object", "maxProperties": 0}},
    },
]
ANSWER = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2}


def reply_start(
    llm: LLM, tool_format: str, tags: ThinkTags | None = None, prompt_tail: str = ""
) -> ReplyStart:
    tokenizer = llm.get_tokenizer()
    reply_format = ReplyFormat.choose(tool_format, "none", None, tokenizer.special_tokens)
    return ReplyStart(replace(reply_format, think_tags=tags), tokenizer.added_tokens, prompt_tail)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply under a grammar, read by the format's own parser."""

    read: ParsedReply
    finish_reason: str | None

    @property
    def whole_calls(self) -> list[ReadCall]:
        """The complete calls: the length limit may have cut the last one."""
        return self.read.calls[: None if self.finish_reason == "stop" else -1]


def replies_to(
    llm: LLM, start: ReplyStart, grammars: list[ReplyGrammar], logit_bias: dict[int, float] | None = None
) -> list[Reply]:
    """Generates one reply for each grammar in one batch."""
    params = [
        SamplingParams(
            structured_outputs=grammar.params,
            max_tokens=300,
            seed=seed,
            skip_special_tokens=not start.reply_format.needs_special_tokens,
            logit_bias=logit_bias,
        )
        for seed, grammar in enumerate(grammars)
    ]
    outputs = llm.generate(["Call!"] * len(params), params, use_tqdm=False)
    replies = []
    for output, grammar in zip(outputs, grammars, strict=True):
        parser = start.reply_format.parser(TOOLS, start.prompt_tail, calls_as_json=grammar.calls_as_json)
        answer = output.outputs[0]
        replies.append(Reply(read_reply(parser, answer.text), answer.finish_reason))
    return replies


def check_calls(reply: Reply, names: set[str]) -> None:
    assert reply.read.calls
    assert reply.finish_reason == "length" or not reply.read.content.strip()
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for call in reply.whole_calls:
        assert call.name in names
        jsonschema.validate(json.loads(call.arguments), {"type": "object", **schemas[call.name]})


@pytest.mark.slow
@pytest.mark.parametrize("tool_format", [*TOOL_FORMATS, "none"])
def test_a_forced_call_is_read_as_a_call(llm: LLM, tool_format: str) -> None:
    """A forced reply has only calls: of any tool, of the named one, one or several."""
    start = reply_start(llm, tool_format)
    one = forced_calls(TOOLS, None, False, start)
    named = forced_calls(TOOLS, "paint", True, start)
    several = forced_calls(TOOLS, None, True, start)
    replies = replies_to(llm, start, [one, one, named, named, several, several])
    for reply in replies[:4]:
        assert (reply.finish_reason, len(reply.read.calls)) == ("stop", 1)
    for reply in replies:
        check_calls(reply, {"paint", "stop"})
    for reply in replies[2:4]:
        check_calls(reply, {"paint"})


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_form_with_tools_is_one_or_the_other(llm: LLM, tool_format: str) -> None:
    """A reply is either JSON of the schema, which is content, or calls."""
    start = reply_start(llm, tool_format)
    grammar = requested_format(StructuredOutputsParams(json=ANSWER), TOOLS, False, start)
    for reply in replies_to(llm, start, [grammar] * 6):
        assert reply.finish_reason == "stop"
        if reply.read.calls:
            check_calls(reply, {"paint", "stop"})
        else:
            jsonschema.validate(json.loads(reply.read.content), ANSWER)


@pytest.mark.parametrize("tags", [ThinkTags("<tool_call>", "</tool_call>"), ThinkTags("(t)", "!")])
@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_comes_before_what_is_forced(llm: LLM, tags: ThinkTags, begun: bool) -> None:
    """If the prompt opened the reasoning, the reply ends it first; if the prompt closed it, the reply has
    none; otherwise it may have some. Tags may be tokens or texts."""
    bias = dict.fromkeys(llm.get_tokenizer().encode(tags.end, add_special_tokens=False), 12.0)
    start = reply_start(llm, "llama3_json", tags, tags.begin + "\n" if begun else "")
    asked = StructuredOutputsParams(json=ANSWER)
    grammars = [forced_calls(TOOLS, None, False, start), requested_format(asked, [], False, start)]
    calls, answer = replies_to(llm, start, grammars, bias)
    check_calls(calls, {"paint", "stop"})
    jsonschema.validate(json.loads(answer.read.content), ANSWER)
    closed = reply_start(llm, "llama3_json", tags, f"{tags.begin}\n\n{tags.end}\n\n")
    (unthinking,) = replies_to(llm, closed, [requested_format(asked, [], False, closed)])
    jsonschema.validate(json.loads(unthinking.read.content), ANSWER)
    assert not unthinking.read.reasoning
