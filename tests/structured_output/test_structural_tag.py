"""Structural tags: which texts follow them, according to their description."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import RequestError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from engine.structured_output.backend import GrammarBackend, TokenTable

AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
Follows = Callable[[Any, str], bool]


@pytest.fixture(scope="module")
def follows(llm: LLM) -> Follows:
    """Returns a function that checks whether a whole text follows a structural tag."""
    tokenizer = llm.get_tokenizer()
    backend = GrammarBackend(TokenTable.of(tokenizer, len(tokenizer.hf)))

    def check(asked: Any, text: str) -> bool:
        params = StructuredOutputsParams(structural_tag=asked)
        grammar = backend.compile(params).start(SamplingParams(structured_outputs=params))
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return grammar.matcher.try_consume_tokens(token_ids) == len(token_ids) and (
            grammar.matcher.is_accepting()
        )

    return check


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value}


def of(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": kind, **fields}}


ANY = {"type": "any_text"}
CALLS = [
    tag("<function=age>", schema(AGE), "</function>"),
    tag("<function=city>", schema(CITY), "</function>"),
]
AGE_CALL = '<function=age>{"age": 3}</function>'
CITY_CALL = '<function=city>{"city": "Oslo"}</function>'
CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "const_string": (of("const_string", value="so: é"), ["so: é"], ["", "so", "so: é."]),
    "json_schema": (of("json_schema", json_schema=AGE), ['{"age": 3}'], ['{"age": "x"}', "{}"]),
    "regex": (of("regex", pattern="[ab]{2}"), ["ab"], ["a", "abc"]),
    "grammar": (of("grammar", grammar='root ::= ("yes" | "no") "!"'), ["yes!", "no!"], ["yes"]),
    "any_text": (of("any_text"), ["", "what <b> ever"], []),
    "excludes": (of("any_text", excludes=["bad", "<b>"]), ["", "ba d"], ["a bad one", "<b>"]),
    "tag": (
        of("tag", begin="<a>", content=ANY, end="</a>"),
        ["<a></a>", "<a>x < y\n</a>"],
        ["x<a></a>", "<a>x", "<a>x</a>y"],
    ),
    "tag with several ends": (
        of("tag", begin="<a>", content=schema(AGE), end=["</a>", "!"]),
        ['<a>{"age": 1}</a>', '<a>{"age": 1}!'],
        ['<a>{"age": 1}', '<a>{"age": 1}</a>!'],
    ),
    "tag without an end": (of("tag", begin="A: ", content=ANY, end=""), ["A: ", "A: b"], ["b", "A"]),
    "sequence": (
        of("sequence", elements=[tag("<think>", ANY, "</think>"), {"type": "const_string", "value": "ok"}]),
        ["<think>so</think>ok"],
        ["ok", "<think>so</think>", "<think>so</think> ok"],
    ),
    "or": (
        of("or", elements=[{"type": "const_string", "value": "a"}, schema(AGE)]),
        ["a", '{"age": 2}'],
        ["b", "aa"],
    ),
    "optional": (of("optional", content=schema(AGE)), ["", '{"age": 2}'], ["x"]),
    "star": (of("star", content=tag("[", schema(AGE), "]")), ["", '[{"age": 1}][{"age": 2}]'], ["[]"]),
    "plus": (of("plus", content={"type": "const_string", "value": "ab"}), ["ab", "abab"], ["", "aba"]),
    "triggered_tags": (
        of("triggered_tags", triggers=["<function="], tags=CALLS),
        ["", "no call", AGE_CALL, f"one {AGE_CALL} two {CITY_CALL}{AGE_CALL} end", "a <function b"],
        ["<function=", "<function=other>{}</function>", "x<function=age>{}</function>"],
    ),
    "at least one": (
        of("triggered_tags", triggers=["<function="], tags=CALLS, at_least_one=True),
        [AGE_CALL, f"{CITY_CALL} and then"],
        ["", "text", f"first {AGE_CALL}"],
    ),
    "the first only": (
        of("triggered_tags", triggers=["<function="], tags=CALLS, stop_after_first=True),
        ["", "text", AGE_CALL, f"first {AGE_CALL}"],
        [f"{AGE_CALL} more", f"{AGE_CALL}{CITY_CALL}"],
    ),
    "exactly one": (
        of("triggered_tags", triggers=["<function="], tags=CALLS, at_least_one=True, stop_after_first=True),
        [AGE_CALL, CITY_CALL],
        ["", f"first {AGE_CALL}", f"{AGE_CALL}{CITY_CALL}"],
    ),
    "two triggers": (
        of(
            "triggered_tags",
            triggers=["<a", "<b"],
            tags=[tag("<a>", ANY, "</a>"), tag("<b>", schema(AGE), "</b>")],
        ),
        ['<a>{</a> <b>{"age": 1}</b>', "<c>"],
        ["<b>x</b>", "<a>never closed"],
    ),
    "text within a tag": (
        of(
            "tag",
            begin="<all>",
            content={"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<f>", schema(AGE), "</f>")]},
            end="</all>",
        ),
        ["<all></all>", '<all>a <f>{"age": 1}</f> b</all>'],
        ["<all>a <f>x</f></all>", "<all>a", "<all></all>b"],
    ),
    "tags_with_separator": (
        of("tags_with_separator", tags=CALLS, separator=", "),
        ["", AGE_CALL, f"{AGE_CALL}, {CITY_CALL}, {AGE_CALL}"],
        ["x", f"{AGE_CALL} {CITY_CALL}", f"{AGE_CALL}, "],
    ),
    "one with a separator": (
        of("tags_with_separator", tags=CALLS, separator="", at_least_one=True, stop_after_first=True),
        [AGE_CALL, CITY_CALL],
        ["", AGE_CALL + CITY_CALL],
    ),
    "V1's older form": (
        {
            "type": "structural_tag",
            "structures": [{"begin": "<function=age>", "schema": AGE, "end": "</function>"}],
            "triggers": ["<function="],
        },
        ["text", f"text {AGE_CALL} text"],
        ["<function=age>{}</function>"],
    ),
    "tags that are tokens": (
        of(
            "triggered_tags",
            triggers=["<tool_"],
            tags=[tag('<tool_call>\n{"a": ', schema(AGE), "}\n</tool_call>")],
        ),
        ["", "text", 'text <tool_call>\n{"a": {"age": 3}}\n</tool_call> text'],
        ["<tool_call>", "</tool_call>", '<tool_call>\n{"a": {}}\n</tool_call>'],
    ),
    "text up to a token": (
        of("tag", begin="<tool_call>", content=ANY, end="\n</tool_call>"),
        ["<tool_call>\n</tool_call>", "<tool_call>a\n\nb\n</tool_call>"],
        ["<tool_call>a</tool_call>", "a\n</tool_call>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_structural_tag_takes_these_texts_and_not_those(follows: Follows, name: str) -> None:
    asked, taken, refused = CASES[name]
    for asked_as in (asked, json.dumps(asked)):
        assert [text for text in taken if not follows(asked_as, text)] == []
        assert [text for text in refused if follows(asked_as, text)] == []


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("{", "is not valid JSON"),
        ([], "must be an object"),
        ({"type": "json"}, "must be 'structural_tag'"),
        ({"type": "structural_tag"}, "needs a format, or structures and triggers"),
        (of("token", token=1), r"\.format\.type must be one of const_string, .*, got 'token'"),
        (of("const_string"), r"\.format\.value must be a text"),
        (of("regex", pattern="("), "is wrong"),
        (of("grammar", grammar="root ::= nothing"), "structural_tag"),
        (of("json_schema", json_schema={"type": "strin"}), "structural_tag"),
        (of("json_schema", json_schema=AGE, style="qwen_xml"), r"\.style must be 'json'"),
        (of("json_schema"), "must be a schema"),
        (of("sequence", elements=[]), r"\.elements must be a list of objects with at least one"),
        (of("sequence", elements=[ANY, schema(AGE)]), r"\.elements\[0\] is text without an end"),
        (of("star", content=ANY), r"\.content is text without an end"),
        (of("triggered_tags", triggers=["<x"], tags=CALLS), r"\.tags\[0\]\.begin must begin with exactly"),
        (of("triggered_tags", triggers=["<", "<f"], tags=CALLS), r"\.tags\[0\]\.begin must begin with exact"),
        (
            of("triggered_tags", triggers=["<"], tags=[tag("<a>", ANY, "")]),
            r"\.tags\[0\] is text without an end",
        ),
        (of("triggered_tags", triggers=["<f"], tags=CALLS, at_least_one=1), r"\.at_least_one must be true"),
        (of("tag", begin="a", content=ANY, end=["x", ""]), r"\.end must not have an empty text"),
        (of("tag", begin="a", content=None, end="x"), r"\.content must be an object"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_structural_tag_is_named(follows: Follows, asked: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        follows(asked if isinstance(asked, str) else json.dumps(asked), "")


def test_formats_in_formats_have_a_limit(follows: Follows) -> None:
    form: Any = {"type": "const_string", "value": "x"}
    for _ in range(33):
        form = {"type": "optional", "content": form}
    with pytest.raises(RequestError, match="more than 32 formats deep"):
        follows({"type": "structural_tag", "format": form}, "")


def test_a_model_follows_structural_tags(llm: LLM) -> None:
    """A model with random output follows the tag from the first token to the last."""
    asked = of(
        "sequence",
        elements=[
            tag("<note>", {"type": "regex", "pattern": "[a-z]{3,9}"}, "</note>"),
            {"type": "tags_with_separator", "tags": CALLS, "separator": "; ", "at_least_one": True}
            | {"stop_after_first": True},
        ],
    )
    params = [
        SamplingParams(
            structured_outputs=StructuredOutputsParams(structural_tag=asked, disable_any_whitespace=True),
            max_tokens=200,
            seed=seed,
        )
        for seed in range(4)
    ]
    for output in llm.generate(["Say!"] * 4, params, use_tqdm=False):
        (said,) = output.outputs
        if said.finish_reason == "stop":
            assert re.fullmatch(r"<note>[a-z]{3,9}</note><function=(age|city)>\{.*\}</function>", said.text)
        assert said.text.startswith("<note>")
