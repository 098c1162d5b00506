"""Promises of the Messages API for any reply, however it is cut and whatever the model writes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jiter import from_json

from engine.api.anthropic.bodies import (
    BlockEvent,
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from engine.api.anthropic.input import read_history
from engine.api.anthropic.thinking import sign, text_of
from engine.api.anthropic.turn import ReplyBlocks
from engine.tokenization.tool_arguments import INVALID_JSON
from engine.tool_parsers import ContentDelta, ReasoningDelta, ReplyDelta, ToolCallDelta
from engine.tool_parsers.arguments import CallArguments

NEARLY_JSON = st.one_of(
    st.text(alphabet='{}[]",:\\ \n0123456789.eE+-truefalsnx\x01ud8dc', max_size=60),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ).flatmap(lambda value: st.sampled_from([json.dumps(value), json.dumps({"a": value, "b": [value]})])),
)
SPOILT_JSON = st.tuples(
    NEARLY_JSON, st.integers(0, 60), st.sampled_from(["", ",", "}", '"', "\\", "\n"])
).map(lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :])
CUT_JSON = st.tuples(NEARLY_JSON, st.integers(0, 60)).map(lambda parts: parts[0][: parts[1]])
ARGUMENTS = NEARLY_JSON | SPOILT_JSON | CUT_JSON


def cut(text: str, places: Sequence[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def read_input(pieces: Sequence[str], *, is_whole: bool = False) -> tuple[str, str]:
    """Returns the input that a client assembles from the stream, and the input of the whole answer."""
    reader = CallArguments()
    given_out = [reader.feed(piece) for piece in pieces]
    return "".join([*given_out, reader.finish(is_whole=is_whole)]), reader.text


@pytest.mark.slow
@settings(max_examples=1500)
@given(ARGUMENTS, st.lists(st.integers(0, 60), max_size=5), st.booleans())
def test_any_arguments_become_an_object(text: str, places: list[int], is_whole: bool) -> None:
    """For any arguments and any cutting, the input is the same JSON object, and so is the one assembled from
    the stream, unless a string has no end: only the whole answer reports that. A sound object is unchanged
    when read again."""
    streamed, whole = read_input([text], is_whole=is_whole)
    assert read_input(cut(text, places), is_whole=is_whole) == (streamed, whole)
    value = json.loads(whole)
    assert isinstance(value, dict)
    assert from_json(whole.encode()) == value
    said = from_json(streamed.encode(), partial_mode=True)
    assert said == (value if streamed == whole else {k: v for k, v in value.items() if k != INVALID_JSON})
    assert read_input(cut(whole, places)) == (whole, whole)


@settings(max_examples=500)
@given(st.dictionaries(st.text(max_size=5), st.text() | st.integers(-(2**70), 2**70) | st.floats(-9, 9)))
def test_sound_arguments_are_not_touched(arguments: dict[str, object]) -> None:
    """A valid object is passed on character by character."""
    for text in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False)):
        assert read_input([text]) == (text, text)


@pytest.mark.parametrize(
    ("written", "streamed", "value"),
    [
        ("", '{"INVALID_JSON": ""}', {INVALID_JSON: ""}),
        ('{"a": "x\ny"}', '{"a": "x\\ny"}', {"a": "x\ny"}),
        (r'{"a": "\d+\ud800"}', r'{"a": "\\d+\\ud800"}', {"a": r"\d+\ud800"}),
        ("[1]", '{"INVALID_JSON": "[1]"}', {INVALID_JSON: "[1]"}),
        ('{"a": True}', '{"a": true}', {"a": True}),
        ('{"a": [1, ], "b": 2, }', '{"a": [1 ], "b": 2 }', {"a": [1], "b": 2}),
        ('```json\n{"a": 1}\n```', '\n{"a": 1}', {"a": 1}),
        ('{"a": NaN}', '{"INVALID_JSON": "{\\"a\\": NaN}"}', {INVALID_JSON: '{"a": NaN}'}),
        (
            '{"a": {"b": 1 "c"',
            '{"a": {"b": 1}, "INVALID_JSON": "{\\"a\\": {\\"b\\": 1 \\"c\\""}',
            {"a": {"b": 1}, INVALID_JSON: '{"a": {"b": 1 "c"'},
        ),
        (
            '{"a": 1, "b": "rm -rf /tm',
            '{"a": 1, "b": "rm -rf /tm',
            {"a": 1, INVALID_JSON: '{"a": 1, "b": "rm -rf /tm'},
        ),
    ],
    ids=[
        *("none", "newline", "escapes", "no object", "python", "commas", "fence", "no number", "broken"),
        "cut off in a string",
    ],
)
def test_what_becomes_of_bad_arguments(written: str, streamed: str, value: object) -> None:
    """Small slips are repaired; if the rest is lost, all written text is kept; a partial string is not
    used."""
    given_out, whole = read_input([written])
    assert given_out == streamed
    assert json.loads(whole) == value


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", "{}"),
        (" \n", "{}"),
        ('{"a": {"b": 1', '{"a": {"b": 1}}'),
        ('{"a": "x"', '{"a": "x"}'),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ('""', "{}"),
        ('{"a": ', '{"INVALID_JSON": "{\\"a\\": "}'),
    ],
)
def test_a_call_whose_end_was_seen_lacks_brackets_only(written: str, said: str) -> None:
    """If the end of a call was seen, nothing was cut off: missing arguments are empty and open brackets are
    closed."""
    assert read_input([written], is_whole=True)[0] == said


def test_long_arguments_take_no_time() -> None:
    """A file of many lines takes linear time: text already read is not copied again for each line."""
    text = '{"a": "' + "x\n" * 200_000 + '"}'
    begun = time.process_time()
    assert len(json.loads(read_input([text])[1])["a"]) == 400_000
    assert time.process_time() - begun < 5


def test_deep_arguments_do_no_harm() -> None:
    """Nesting too deep for clients is not read as input."""
    text = '{"a": ' + "[" * 5000
    assert json.loads(read_input([text])[1])[INVALID_JSON] == text


@given(ARGUMENTS)
def test_bad_arguments_come_back_as_they_were_written(text: str) -> None:
    """An unreadable input, sent back, renders to the model's own text: the same tokens."""
    value = json.loads(read_input([text])[1])
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": value}
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    history = read_history(
        None, [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    )
    arguments = history.messages[0]["tool_calls"][0]["function"]["arguments"]
    assert arguments == (text if INVALID_JSON in value else value)


def fold(events: Sequence[BlockEvent]) -> list[ContentBlock]:
    """Assembles a stream's blocks as a client does, and checks their order."""
    blocks: list[ContentBlock] = []
    inputs: list[str] = []
    is_open = False
    for event in events:
        if isinstance(event, ContentBlockStart):
            assert not is_open
            assert event.index == len(blocks)
            blocks.append(event.content_block)
            inputs.append("")
            is_open = True
            continue
        assert is_open
        assert event.index == len(blocks) - 1
        if isinstance(event, ContentBlockStop):
            is_open = False
            if isinstance(block := blocks[-1], ToolUseBlock):
                block.input = msgspec.Raw(
                    json.dumps(from_json(inputs[-1].encode(), partial_mode=True)).encode()
                )
            continue
        assert isinstance(event, ContentBlockDelta)
        match blocks[-1], event.delta:
            case TextBlock() as block, TextDelta(text):
                block.text += text
            case ThinkingBlock() as block, ThinkingDelta(thinking):
                block.thinking += thinking
            case ThinkingBlock() as block, SignatureDelta(signature):
                block.signature = signature
            case ToolUseBlock(), InputJsonDelta(partial):
                inputs[-1] += partial
            case _:
                raise AssertionError(event)
    assert not is_open
    return blocks


def decoded(blocks: Sequence[ContentBlock]) -> Any:
    return json.loads(msgspec.json.encode(list(blocks)))


def without_the_cut_off(whole: Any, folded: Any) -> Any:
    """The whole answer without the fields that only it can report about a call that ended inside a string."""
    blocks = []
    for block, streamed in zip(whole, folded, strict=True):
        said = block.get("input", {})
        if INVALID_JSON in said and INVALID_JSON not in streamed.get("input", {}):
            block = {**block, "input": {key: said[key] for key in said if key != INVALID_JSON}}
        blocks.append(block)
    return blocks


PARTS = st.lists(
    st.one_of(
        st.tuples(st.just("content"), st.text(min_size=1, max_size=8)),
        st.tuples(st.just("reasoning"), st.text(min_size=1, max_size=8)),
        st.tuples(st.just("call"), ARGUMENTS),
    ),
    max_size=6,
)


def deltas_of(parts: Sequence[tuple[str, str]], places: Sequence[int]) -> list[ReplyDelta]:
    """The reply's deltas, with each text cut at these places."""
    deltas: list[ReplyDelta] = []
    num_calls = 0
    for kind, text in parts:
        pieces = cut(text, places)
        match kind:
            case "content":
                deltas += [ContentDelta(piece) for piece in pieces]
            case "reasoning":
                deltas += [ReasoningDelta(piece) for piece in pieces]
            case _:
                deltas.append(ToolCallDelta(num_calls, f"call_{num_calls}", "f", ""))
                deltas += [ToolCallDelta(num_calls, arguments=piece) for piece in pieces]
                num_calls += 1
    return deltas


@settings(max_examples=500)
@given(PARTS, st.lists(st.integers(0, 60), max_size=4), st.booleans())
def test_a_stream_adds_up_to_the_whole_answer(
    parts: list[tuple[str, str]], places: list[int], omits_thinking: bool
) -> None:
    """For any reply and cutting, the stream's blocks equal those of the whole answer, in the model's order,
    each properly begun and ended. Only for a string without an end the whole answer reports more."""
    whole = ReplyBlocks(omits_thinking=omits_thinking)
    list(whole.add(deltas_of(parts, [])))
    list(whole.finish())
    streamed = ReplyBlocks(omits_thinking=omits_thinking)
    events = [event for delta in deltas_of(parts, places) for event in streamed.add([delta])]
    events += streamed.finish()
    folded = decoded(fold(events))
    assert folded == without_the_cut_off(decoded(whole.content), folded)
    assert decoded(streamed.content) == decoded(whole.content)
    assert whole.calls_tools == any(kind == "call" for kind, _ in parts)


@given(st.text(max_size=200), st.booleans())
def test_a_signature_brings_the_thinking_back(thinking: str, omitted: bool) -> None:
    """A signature contains reasoning that is hidden from the client; a changed signature yields none."""
    signature = sign(thinking, with_text=omitted)
    assert signature
    assert text_of("" if omitted else thinking, signature) == thinking
    assert text_of("", signature[:-2]) in ("", thinking)
    assert text_of("", "EqQBCgIYAhIM…") == ""


@given(PARTS, st.booleans())
def test_a_reply_sent_back_is_the_reply(parts: list[tuple[str, str]], omits_thinking: bool) -> None:
    """The blocks of an answer, sent back, are read as the reply they were made of."""
    blocks = ReplyBlocks(omits_thinking=omits_thinking)
    list(blocks.add(deltas_of(parts, [])))
    list(blocks.finish())
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
        for block in blocks.content
        if isinstance(block, ToolUseBlock)
    ]
    history = read_history(
        "Be brief.",
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": decoded(blocks.content)},
            {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
        ],
    )
    reply = history.messages[2]
    assert reply["content"] == "".join(text for kind, text in parts if kind == "content")
    assert reply.get("reasoning", "") == "".join(text for kind, text in parts if kind == "reasoning")
    assert len(reply.get("tool_calls", [])) == len(results)
    assert [message["tool_call_id"] for message in history.messages[3:-1]] == [
        call["id"] for call in reply.get("tool_calls", [])
    ]
    assert history.messages[-1] == {"role": "user", "content": "go on"}
