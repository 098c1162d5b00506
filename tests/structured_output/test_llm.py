"""``LLM.generate`` with grammars, on a real model whose own output is noise."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.frontend.llm import LLM
from engine.frontend.request_output import CompletionOutput, RequestOutput
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import (
    MAX_GRAMMAR_BYTES,
    ReasoningSpan,
    StructuredOutputsParams,
)

TEXT = {"type": "string", "maxLength": 8}
PERSON = {
    "type": "object",
    "properties": {"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": PERSON,
    "array": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1, "maxItems": 4},
    "reference": {
        "type": "object",
        "properties": {"by": {"$ref": "#/$defs/person"}, "to": {"$ref": "#/$defs/person"}},
        "required": ["by", "to"],
        "additionalProperties": False,
        "$defs": {"person": PERSON},
    },
    "any of": {"anyOf": [PERSON, {"type": "boolean"}, {"const": "none"}]},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,5}(-[0-9]{1,3})?$"},
    "number": {"type": "number", "minimum": -1, "maximum": 1},
    "format": {"type": "string", "format": "date"},
    "optional": {
        "type": "object",
        "properties": {
            "a": {"type": "boolean"},
            "c": {"maximum": 10**30, "type": "null"},
            "b": {"type": "null"},
            "ü \"'": {"const": "é\n"},
        },
        "additionalProperties": False,
    },
}
DIGITS = StructuredOutputsParams(regex="[0-9]{6}")


def sampling(wanted: StructuredOutputsParams, **options: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=wanted, **({"max_tokens": 600, "seed": 7} | options))


def one(llm: LLM, params: SamplingParams, prompt: str = "Say something") -> CompletionOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_follows_its_schema(llm: LLM, name: str, temperature: float) -> None:
    """Output follows a schema, greedy or sampled, with or without whitespace, from an object or its text."""
    schema = SCHEMAS[name]
    for wanted in (
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True),
    ):
        output = one(llm, sampling(wanted, temperature=temperature))
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), schema)


INTEGERS = st.builds(
    lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
    st.integers(-50, 50),
    st.integers(0, 1000),
)
STRINGS = st.builds(
    lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
    st.integers(0, 3),
    st.integers(0, 3),
)
# Many readers of JSON are not exact beyond 53 bits.
VALUES = st.one_of(st.text(max_size=4), st.integers(-(2**53), 2**53), st.booleans())


def objects(properties: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Object schemas with these properties, some of them required."""
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    names = st.sampled_from(sorted(properties)) if properties else st.nothing()
    return st.sets(names).map(lambda required: schema | {"required": sorted(required)})


def containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    choices = st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    properties = st.dictionaries(st.text(min_size=1, max_size=4), inner, max_size=3)
    return st.one_of(arrays, choices, properties.flatmap(objects))


BOUNDED_SCHEMAS = st.recursive(
    st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
        INTEGERS,
        STRINGS,
        st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    ),
    containers,
    max_leaves=5,
)
"""Schemas whose instances are all short."""


@settings(max_examples=40, deadline=None)
@given(schema=BOUNDED_SCHEMAS, seed=st.integers(0, 2**32))
def test_any_bounded_schema_is_followed(llm: LLM, schema: dict[str, Any], seed: int) -> None:
    """Every output is complete: no schema is refused, and none allows an output without an end."""
    params = sampling(StructuredOutputsParams(json=schema, disable_any_whitespace=True), seed=seed)
    output = one(llm, params)
    assert output.finish_reason == "stop"
    jsonschema.validate(json.loads(output.text), schema)


def test_every_kind_in_one_batch(llm: LLM) -> None:
    """Each request follows its own grammar, and one without a grammar gets the tokens that it gets alone."""
    plain = SamplingParams(temperature=0.0, max_tokens=40)
    params = [
        sampling(StructuredOutputsParams(regex=r"[0-9]{3}-(ab|cd){1,2}")),
        sampling(StructuredOutputsParams(choice=["red", "green", 'blå "😀"\n'])),
        plain,
        sampling(StructuredOutputsParams(grammar='start: ("x" NUMBER)+ "!"\nNUMBER: /[0-9]{1,3}/')),
        sampling(StructuredOutputsParams(grammar='root ::= "yes" | "no" [0-9]')),
        sampling(StructuredOutputsParams(json_object=True), max_tokens=30),
    ]
    outputs = llm.generate(["Hello"] * len(params), params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert re.fullmatch(r"[0-9]{3}-(ab|cd){1,2}", texts[0])
    assert texts[1] in ("red", "green", 'blå "😀"\n')
    assert outputs[2].outputs[0].token_ids == one(llm, plain, "Hello").token_ids
    assert re.fullmatch(r"(x[0-9]{1,3})+!", texts[3])
    assert re.fullmatch(r"yes|no[0-9]", texts[4])
    assert texts[5].startswith("{")


def test_texts_that_are_tokens_of_their_own_may_be_part_of_a_grammar(llm: LLM) -> None:
    """Text of an added token such as ``<tool_call>``, even of EOS ``<|im_end|>``, is text in a grammar."""
    for text in ("a<tool_call>b", "<|im_end|>", "<|im_start|>x"):
        for wanted in (
            StructuredOutputsParams(choice=[text]),
            StructuredOutputsParams(json={"const": text}),
            StructuredOutputsParams(grammar=f'start: "{text}"'),
        ):
            output = one(llm, sampling(wanted))
            assert output.finish_reason == "stop"
            assert output.text.strip('"') == text
    by_number = StructuredOutputsParams(grammar="start: <tool_call> /[a-z]{2}/ </tool_call>")
    assert re.fullmatch("<tool_call>[a-z]{2}</tool_call>", one(llm, sampling(by_number)).text)


def test_several_answers_each_follow_the_grammar(llm: LLM) -> None:
    """All n answers of one request are complete, and they differ."""
    params = sampling(StructuredOutputsParams(json=PERSON), n=4)
    answers = llm.generate("Someone", params, use_tqdm=False)[0].outputs
    for answer in answers:
        jsonschema.validate(json.loads(answer.text), PERSON)
    assert len({answer.text for answer in answers}) > 1


def test_the_same_output_where_requests_are_preempted(llm: LLM, model_folder: Path) -> None:
    """In a pool for two of six requests some are preempted and continue with the same output."""
    wanted = StructuredOutputsParams(regex="([a-z]{3} [0-9]{2},){20}")
    params = [sampling(wanted, seed=seed, max_tokens=300) for seed in range(6)]
    prompts = [f"Prompt {number}" for number in range(6)]
    roomy = llm.generate(prompts, params, use_tqdm=False)
    with LLM(
        str(model_folder),
        multiprocess=False,
        num_gpu_blocks_override=24,
        max_model_len=360,
        enable_prefix_caching=False,
    ) as small:
        tight = small.generate(prompts, params, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in tight if output.metrics) > 0
    assert [texts(output) for output in tight] == [texts(output) for output in roomy]
    assert all(re.fullmatch("([a-z]{3} [0-9]{2},){20}", texts(output)[0]) for output in tight)


def texts(output: RequestOutput) -> list[str]:
    return [answer.text for answer in output.outputs]


def test_limits_of_the_request_go_with_the_grammar(llm: LLM) -> None:
    """max_tokens cuts, stop strings end, min_tokens delays EOS, logprobs are the model's own."""
    cut = one(llm, sampling(DIGITS, max_tokens=2))
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 2)

    stopped = one(llm, sampling(StructuredOutputsParams(regex="a{3}b{3}"), stop=["ab"]))
    assert (stopped.finish_reason, stopped.stop_reason, stopped.text) == ("stop", "ab", "aa")

    long = one(llm, sampling(StructuredOutputsParams(regex="[0-9]*"), min_tokens=9, max_tokens=12))
    assert len(long.token_ids) >= 9
    assert long.text.isdigit()

    told = one(llm, sampling(DIGITS, logprobs=2))
    assert told.logprobs is not None
    assert len(told.logprobs) == len(told.token_ids)
    assert all(
        math.isfinite(entry.logprob)
        for position in told.logprobs
        for entry in (position.chosen, *position.top)
    )


def test_an_output_ends_only_where_its_grammar_may(llm: LLM) -> None:
    """EOS and stop tokens, however likely, come only when the grammar may end."""
    tokenizer = llm.get_tokenizer()
    (stop_token,) = tokenizer.encode("!")
    assert tokenizer.eos_token_id is not None
    for wanted_id, options in (
        (tokenizer.eos_token_id, {}),
        (stop_token, {"stop_token_ids": [stop_token]}),
    ):
        params = sampling(
            StructuredOutputsParams(regex="[0-9]{4,200}"), logit_bias={wanted_id: 100.0}, **options
        )
        output = one(llm, params)
        assert output.finish_reason == "stop"
        assert re.fullmatch("[0-9]{4,5}", output.text)

    ignoring = sampling(
        StructuredOutputsParams(regex="[0-9]{4,8}"),
        logit_bias={tokenizer.eos_token_id: 100.0},
        ignore_eos=True,
    )
    assert re.fullmatch("[0-9]{8}", one(llm, ignoring).text)


def test_recorded_tokens_come_as_recorded(llm: LLM) -> None:
    """With replay_token_ids the grammar does not change the tokens."""
    tokens = llm.get_tokenizer().encode("not a number")
    output = one(llm, sampling(DIGITS, replay_token_ids=tokens, max_tokens=len(tokens)))
    assert output.token_ids == tokens


def test_reasoning_comes_first(llm: LLM) -> None:
    """Any text up to the end of the reasoning comes first, then the constrained part; reasoning may be
    missing only if it has an opening tag."""
    tokenizer = llm.get_tokenizer()
    (end,) = tokenizer.encode("</tool_call>")
    (start,) = tokenizer.encode("<tool_call>")
    token_tags = ReasoningSpan("</tool_call>")
    output = one(
        llm,
        sampling(StructuredOutputsParams(choice=["yes", "no"], reasoning=token_tags), logit_bias={end: 8.0}),
    )
    assert re.fullmatch(r"(?s).*</tool_call>\s{0,8}(yes|no)", output.text)

    text_tags = ReasoningSpan("</t>")
    output = one(
        llm,
        sampling(
            StructuredOutputsParams(choice=["yes", "no"], reasoning=text_tags),
            logit_bias=dict.fromkeys(tokenizer.encode("</t>", add_special_tokens=False), 12.0),
        ),
    )
    assert re.fullmatch(r"(?s).*?</t>\s{0,8}(yes|no)", output.text)

    optional = ReasoningSpan("</tool_call>", "<tool_call>")
    for bias in (-100.0, 100.0):
        output = one(
            llm,
            sampling(
                StructuredOutputsParams(choice=["yes", "no"], reasoning=optional),
                logit_bias={start: bias, end: 8.0},
            ),
        )
        reasoning = r"<tool_call>.*</tool_call>\s{0,8}" if bias > 0 else ""
        assert re.fullmatch(f"(?s){reasoning}(yes|no)", output.text)


def test_what_nothing_can_satisfy_ends_in_an_error_of_its_own(llm: LLM) -> None:
    """A grammar and other limits that leave no token fail their request; others of the batch go on."""
    impossible = sampling(DIGITS, allowed_token_ids=llm.get_tokenizer().encode("abc"), temperature=0.0)
    failed, fine = llm.generate(["a", "b"], [impossible, sampling(DIGITS)], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert "allowed_token_ids" in str(failed.outputs[0].stop_reason)
    assert fine.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("wanted", "field", "reason"),
    [
        ({}, "structured_outputs", "exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs", "got regex and choice"),
        ({"json": {"type": "strin"}}, "structured_outputs.json", "strin"),
        ({"json": "{"}, "structured_outputs.json", "not a valid JSON schema"),
        ({"json": "[1]"}, "structured_outputs.json", "not a valid JSON schema"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json", "JSON"),
        ({"json": {"const": {1, 2}}}, "structured_outputs.json", "JSON"),
        ({"json": {"$ref": "#/nowhere"}}, "structured_outputs.json", "nowhere"),
        ({"json": {"$ref": "https://example.org/schema"}}, "structured_outputs.json", "not present"),
        ({"json": {"type": "array", "uniqueItems": True}}, "structured_outputs.json", "uniqueItems"),
        ({"json": {"not": {}}}, "structured_outputs.json", "not"),
        ({"json_object": False}, "structured_outputs.json_object", "can only be true"),
        ({"regex": "a("}, "structured_outputs.regex", "unclosed group"),
        ({"regex": "(?=a)b"}, "structured_outputs.regex", "look-around"),
        ({"regex": "a", "lenient": True}, "structured_outputs.regex", "lenient is for json only"),
        ({"choice": []}, "structured_outputs.choice", "1 to 4096"),
        ({"choice": ["a", ""]}, "structured_outputs.choice", "empty text"),
        ({"choice": ["\ud800"]}, "structured_outputs.choice", "half of a surrogate pair"),
        ({"grammar": "start: nothing"}, "structured_outputs.grammar", "nothing"),
        ({"grammar": 'root ::= "a'}, "structured_outputs.grammar", "not a valid grammar"),
        ({"grammar": "no rules at all"}, "structured_outputs.grammar", "not a valid grammar"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "structured_outputs.regex", "bytes; at most"),
        ({"json": {"type": "strin"}, "asked_in": "response_format"}, "response_format", "response_format is"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(llm: LLM, wanted: dict[str, Any], field: str, reason: str) -> None:
    """Wrong constraints are refused in one short sentence, before any request runs."""
    params = sampling(StructuredOutputsParams(**wanted))
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        llm.generate(["fine", "wrong"], [sampling(DIGITS), params], use_tqdm=False)
    assert caught.value.field == field
    assert len(str(caught.value)) < 500


def test_what_cannot_be_enforced_may_be_ignored(llm: LLM) -> None:
    """A lenient schema is followed where it can be enforced."""
    schema = {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}, "maxItems": 3}
    output = one(llm, sampling(StructuredOutputsParams(json=schema, lenient=True)))
    assert set(json.loads(output.text)) <= {1, 2}


def test_a_large_grammar_stands_in_nobodys_way(llm: LLM) -> None:
    """A plain request finishes before an earlier one whose grammar takes long to compile."""
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,200}$"} for i in range(2000)},
    }
    engine = llm.engine
    engine.add_request("large", "a", sampling(StructuredOutputsParams(json=schema), max_tokens=4))
    engine.add_request("plain", "b", SamplingParams(max_tokens=4))
    ended = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    assert ended == ["plain", "large"]


def test_a_choice_may_be_a_long_one(llm: LLM) -> None:
    """The largest allowed number of choices works, which no rule of a grammar could hold."""
    choice = [f"text number {number} of many" for number in range(4096)]
    output = one(llm, sampling(StructuredOutputsParams(choice=choice)))
    assert output.text in choice


def test_what_is_too_wide_to_follow_is_refused_at_once(llm: LLM) -> None:
    """A grammar with too many alternatives is refused at once, not at the first token."""
    words = " ".join(f"r{number}?" for number in range(6000))
    rules = "\n".join(f'r{number}: "x{number}"' for number in range(6000))
    with pytest.raises(RequestError, match=r"structured_outputs\.grammar is wrong"):
        one(llm, sampling(StructuredOutputsParams(grammar=f"start: {words}\n{rules}")))
