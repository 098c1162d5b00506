"""Promises of /v1/messages, checked on a real server and model with the anthropic client."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import pydantic
import pytest
from anthropic.types import Message, MessageParam, ToolParam

from engine.worker.loading import tiny_models
from tests.api.server import Server, running_server
from tests.api.test_chat import CALL_TEXT, token_ids

HELLO: list[MessageParam] = [{"role": "user", "content": "hello"}]
BASH: ToolParam = {
    "name": "bash",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
CACHED = {"type": "ephemeral"}
BLOCK_SIZE = 16
Body = dict[str, Any]


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def thinker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model reasons; its template renders the reasoning of earlier turns too."""
    template = tmp_path_factory.mktemp("templates") / "thinking.jinja"
    shipped = Path(tiny_models.__file__).with_name("chat_template.jinja").read_text()
    assistant = "'<|im_start|>assistant\\n' + (message.content"
    assert assistant in shipped
    thought = "('<think>\\n' + message.reasoning + '\\n</think>\\n\\n' if message.reasoning else '')"
    template.write_text(
        shipped.replace(assistant, assistant.replace("(message", f"{thought} + (message")).replace(
            "{%- if add_generation_prompt %}",
            "{%- if add_generation_prompt and enable_thinking is not false %}",
        )
    )
    with running_server(
        model, "--num-gpu-blocks-override", "400", "--chat-template", str(template)
    ) as running:
        yield running


def replay(http: httpx.Client, text: str) -> Body:
    """The request fields that force this reply."""
    return {"replay_token_ids": token_ids(http, text + "<|im_end|>")}


def post(http: httpx.Client, body: Body) -> Body:
    answer = http.post("/v1/messages", json={"max_tokens": 50, **body})
    assert answer.status_code == 200, answer.text
    message: Body = answer.json()
    return message


def events(http: httpx.Client, body: Body) -> list[Body]:
    """A stream's events; each event's name is the type in its data."""
    found: list[Body] = []
    with http.stream("POST", "/v1/messages", json={"max_tokens": 50, **body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in filter(None, response.iter_lines()):
            kind, _, value = line.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data":
                found.append(json.loads(value))
                assert found[-1]["type"] == name
    return found


def total_input(message: Body) -> int:
    usage = message["usage"]
    return int(
        usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    )


def test_a_message_is_answered(claude: anthropic.Anthropic) -> None:
    """A conversation gets a message of blocks, a stop reason, token counts and a request id."""
    message = claude.messages.create(model="tiny", max_tokens=5, messages=HELLO)
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert message.id.startswith("msg_")
    assert [block.type for block in message.content] == ["text"]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 5
    assert message._request_id


def test_a_stream_on_the_wire(http: httpx.Client) -> None:
    """Events come in order; the input's tokens are known at the start, the output's at the end."""
    body: Body = {"messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = post(http, body)
    first, ping, start, *deltas, stop, end, last = events(http, body)
    assert (first["type"], ping["type"], last["type"]) == ("message_start", "ping", "message_stop")
    assert first["message"]["content"] == []
    assert first["message"]["stop_reason"] is None
    assert total_input(first["message"]) == total_input(whole)
    assert start == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert {(delta["index"], delta["delta"]["type"]) for delta in deltas} == {(0, "text_delta")}
    assert "".join(delta["delta"]["text"] for delta in deltas) == whole["content"][0]["text"]
    assert stop == {"type": "content_block_stop", "index": 0}
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 12


def test_the_librarys_stream_is_the_whole_message(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    """The message that the library assembles from a stream equals the one without streaming."""
    request: Body = {"model": "tiny", "max_tokens": 200, "messages": HELLO, "tools": [BASH]}
    extra = replay(http, CALL_TEXT + CALL_TEXT.removeprefix("Let me look."))
    whole = claude.messages.create(**request, extra_body=extra)
    with claude.messages.stream(**request, extra_body=extra) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["text", "tool_use", "tool_use"]
    assert comparable(streamed) == comparable(whole)


def comparable(message: Message) -> object:
    """The message without the fields that are new every time."""
    blocks = [block.to_dict() for block in message.content]
    return [{key: block[key] for key in block if key != "id"} for block in blocks], message.stop_reason


def test_a_loop_of_tool_calls(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    """A call is a tool_use block with an object as input; the conversation continues with its result."""
    request: Body = {"model": "tiny", "max_tokens": 60, "tools": [BASH]}
    first = claude.messages.create(**request, messages=HELLO, extra_body=replay(http, CALL_TEXT))
    text, call = first.content
    assert first.stop_reason == "tool_use"
    assert text.to_dict() == {"type": "text", "text": "Let me look."}
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("bash", {"command": "ls -l"})
    assert call.id.startswith("toolu_")
    result: MessageParam = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "a.txt"}],
    }
    second = claude.messages.create(
        **request, messages=[*HELLO, first.to_param(), result], extra_body=replay(http, "There is a.txt.")
    )
    assert (second.stop_reason, second.content[0].type) == ("end_turn", "text")


def next_turn(http: httpx.Client, body: Body, reply: str, *more: Body) -> tuple[Body, Body]:
    """Runs a turn with this reply, and the turn that sends it back followed by ``more``."""
    first = post(http, {**body, **replay(http, reply), "return_token_ids": True})
    history = [*body["messages"], {"role": "assistant", "content": first["content"]}, *more]
    second = post(http, {**body, "messages": history, "max_tokens": 1, "return_token_ids": True})
    return first, second


def result_of(text: str = "a.txt", **fields: object) -> Body:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": text, **fields}


FOLLOWED_BY: dict[str, list[Body]] = {
    "result": [{"role": "user", "content": [result_of()]}],
    "error": [{"role": "user", "content": [result_of("no such file", is_error=True)]}],
    "result and text": [{"role": "user", "content": [result_of(), {"type": "text", "text": "be quick"}]}],
    "result and reminder": [
        {"role": "user", "content": [result_of()]},
        {"role": "system", "content": "<total_tokens>900 tokens left</total_tokens>"},
    ],
    "reminder before the result": [
        {"role": "system", "content": "The user is away."},
        {"role": "user", "content": [result_of()]},
    ],
}


@pytest.mark.parametrize("more", FOLLOWED_BY.values(), ids=FOLLOWED_BY.keys())
def test_a_turn_extends_the_one_before(http: httpx.Client, more: list[Body]) -> None:
    """A reply sent back renders to the tokens it was generated as, so prompt and reply are cached."""
    system = [
        {"type": "text", "text": f"You are terse, in {len(json.dumps(more))} ways.", "cache_control": CACHED}
    ]
    body: Body = {"messages": HELLO, "system": system, "tools": [BASH]}
    first, second = next_turn(http, body, CALL_TEXT, *more)
    tip = first["prompt_token_ids"] + first["token_ids"]
    assert second["prompt_token_ids"][: len(tip)] == tip
    # The KV of the reply's last token is never computed.
    assert second["usage"]["cache_read_input_tokens"] == (len(tip) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_a_broken_call_extends_it_too(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    """Invalid JSON arguments are returned as text in an object, and render as the model wrote them."""
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": ls}}\n</tool_call>'
    body: Body = {"messages": HELLO, "tools": [BASH]}
    first, second = next_turn(http, body, broken, {"role": "user", "content": [result_of("bad input")]})
    [call] = first["content"]
    assert call["input"] == {"INVALID_JSON": '{"command": ls}'}
    tip = first["prompt_token_ids"] + first["token_ids"]
    assert second["prompt_token_ids"][: len(tip)] == tip
    with claude.messages.stream(
        model="tiny", max_tokens=60, messages=HELLO, tools=[BASH], extra_body=replay(http, broken)
    ) as stream:
        [streamed] = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input == call["input"]


def test_reminders_stay_where_they_are(http: httpx.Client) -> None:
    """A system message appended in each turn leaves everything before it unchanged."""
    reminder = {"role": "system", "content": "Mind the gap."}
    first: Body = {"messages": [*HELLO, reminder], "system": "You are terse.", "return_token_ids": True}
    one = post(http, first)
    reply = {"role": "assistant", "content": "Yes."}
    two = post(http, {**first, "messages": [*first["messages"], reply, *HELLO, reminder]})
    assert two["prompt_token_ids"][: len(one["prompt_token_ids"])] == one["prompt_token_ids"]
    text = http.post("/detokenize", json={"tokens": two["prompt_token_ids"]}).json()["prompt"]
    assert text.count("<system-reminder>\nMind the gap.\n</system-reminder>") == 2


def billing(number: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa{number};"


def billed_block(number: int) -> Body:
    system = [{"type": "text", "text": billing(number)}, {"type": "text", "text": "You are terse."}]
    return {"system": system}


def billed_line(number: int) -> Body:
    return {"system": f"{billing(number)}\nYou are terse."}


def billed_message(number: int) -> Body:
    text = f"{billing(number)}\nYou are terse."
    return {"messages": [{"role": "system", "content": text}, *HELLO]}


@pytest.mark.parametrize("billed", [billed_block, billed_line, billed_message])
def test_the_billing_header_is_removed(http: httpx.Client, billed: Any) -> None:
    """Claude Code's billing text, new in every request, is removed from the prompt, and that is counted."""

    def num_removed() -> float:
        name = "continuum:prefix_killers_removed_total{"
        lines = http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(name) and 'kind="billing_header"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    plain = post(http, {"messages": HELLO, "system": "You are terse.", "return_token_ids": True})
    before = num_removed()
    for number in range(2):
        message = post(http, {"messages": HELLO, "return_token_ids": True, **billed(number)})
        assert message["prompt_token_ids"] == plain["prompt_token_ids"]
    assert num_removed() == before + 2


def test_it_is_removed_behind_a_gateway_too(http: httpx.Client) -> None:
    """Gateways send the billing header as the first line of a system message; it is removed too."""

    def num_tokens(system: str) -> int:
        chat = {"messages": [{"role": "system", "content": system}, *HELLO], "max_tokens": 1}
        return int(http.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"])

    assert num_tokens(f"{billing(1)}\nYou are terse.") == num_tokens("You are terse.")


@pytest.mark.parametrize("marked", ["system", "tools", "messages", "request", None])
def test_what_is_cached_is_counted(http: httpx.Client, marked: str | None) -> None:
    """All input counts as read from the cache, as written to it (marked full blocks), or as neither."""
    mark = {"cache_control": CACHED}
    text = f"cached by {marked} " * 12
    body: Body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}],
        "system": [{"type": "text", "text": text}],
        "tools": [dict(BASH)],
    }
    match marked:
        case "system":
            body["system"][0] |= mark
        case "tools":
            body["tools"][0] |= mark
        case "messages":
            body["messages"][0]["content"][0] |= mark
        case "request":
            body |= mark
    first, second = (post(http, {**body, "max_tokens": 1}) for _ in range(2))
    total = total_input(first)
    in_full_blocks = total // BLOCK_SIZE * BLOCK_SIZE
    read = first["usage"]["cache_read_input_tokens"]
    written = first["usage"]["cache_creation_input_tokens"]
    assert written == (in_full_blocks - read if marked else 0)
    assert total_input(second) == total
    assert second["usage"]["cache_read_input_tokens"] == (total - 1) // BLOCK_SIZE * BLOCK_SIZE


COUNTED: dict[str, Body] = {
    "plain": {"messages": HELLO},
    "system": {"messages": HELLO, "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    "tools": {"messages": HELLO, "tools": [BASH], "tool_choice": {"type": "auto"}},
    "typed tools": {
        "messages": HELLO,
        "tools": [
            {"type": "bash_20250124", "name": "bash"},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        ],
    },
    "editor": {
        "messages": HELLO,
        "tools": [{"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}],
    },
    "memory": {"messages": HELLO, "tools": [{"type": "memory_20250818", "name": "memory"}]},
    "history": {
        "messages": [
            *HELLO,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Where am I?", "signature": "EqQBCgIYAhIM"},
                    {"type": "redacted_thinking", "data": "abc"},
                    {"type": "text", "text": "Looking."},
                    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
                    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
                    {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"command": "pwd"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1"},
                    {"type": "document", "source": {"type": "text", "data": "a page"}, "title": "Page"},
                ],
            },
        ]
    },
    "prefilled": {"messages": [*HELLO, {"role": "assistant", "content": "The answer is"}]},
    "two of a role": {"messages": [*HELLO, *HELLO]},
    "thinking": {"messages": HELLO, "thinking": {"type": "enabled", "budget_tokens": 1024}},
}


@pytest.mark.parametrize("body", COUNTED.values(), ids=COUNTED.keys())
def test_tokens_are_counted_as_they_will_be(http: httpx.Client, body: Body) -> None:
    """count_tokens equals the input tokens of the same body as a message."""
    counted = http.post("/v1/messages/count_tokens", json={"model": "tiny", **body}).json()
    assert counted == {"input_tokens": total_input(post(http, {**body, "max_tokens": 1}))}


THOUGHT = "The user greets me.\nI look around."
THINKING_REPLY = f"<think>\n{THOUGHT}\n</think>\n\n{CALL_TEXT}"


@pytest.mark.parametrize("display", [None, "summarized", "omitted"])
def test_thinking_comes_and_goes_back(thinker: Server, display: str | None) -> None:
    """Reasoning is a signed block before the others. Sent back, even if hidden from the client, it is part of
    the next prompt as it was generated."""
    thinking = {"thinking": {"type": "adaptive", "display": display}}
    with httpx.Client(base_url=thinker.url, timeout=60) as http:
        body: Body = {"messages": HELLO, "tools": [BASH], "max_tokens": 100, **thinking}
        result = {"role": "user", "content": [result_of()]}
        first, second = next_turn(http, body, THINKING_REPLY, result)
        stream = events(http, {**body, **replay(http, THINKING_REPLY)})
    thought, text, call = first["content"]
    assert (thought["type"], text["type"], call["type"]) == ("thinking", "text", "tool_use")
    assert thought["thinking"] == ("" if display == "omitted" else THOUGHT)
    assert thought["signature"]
    assert first["usage"]["output_tokens_details"]["thinking_tokens"] > 5
    tip = first["prompt_token_ids"] + first["token_ids"]
    assert second["prompt_token_ids"][: len(tip)] == tip
    deltas = [
        event["delta"] for event in stream if event["type"] == "content_block_delta" and event["index"] == 0
    ]
    assert "".join(delta.get("thinking", "") for delta in deltas) == thought["thinking"]
    assert deltas[-1] == {"type": "signature_delta", "signature": thought["signature"]}


def test_the_library_adds_thinking_up(thinker: Server) -> None:
    """Reasoning and its signature are the same, streamed or not."""
    with (
        anthropic.Anthropic(base_url=thinker.url, api_key="none", timeout=60) as claude,
        httpx.Client(base_url=thinker.url, timeout=60) as http,
    ):
        request: Body = {
            "model": "tiny",
            "max_tokens": 100,
            "messages": HELLO,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        extra = replay(http, THINKING_REPLY)
        whole = claude.messages.create(**request, extra_body=extra)
        with claude.messages.stream(**request, extra_body=extra) as stream:
            assert comparable(stream.get_final_message()) == comparable(whole)


def test_thinking_can_be_turned_off(thinker: Server) -> None:
    """The template is asked to reason only if the request says so, as in Anthropic's API."""
    with httpx.Client(base_url=thinker.url, timeout=60) as http:
        counts = [
            http.post("/v1/messages/count_tokens", json={"messages": HELLO, **fields}).json()["input_tokens"]
            for fields in (
                {},
                {"thinking": {"type": "enabled", "budget_tokens": 1024}},
                {"thinking": {"type": "disabled"}},
            )
        ]
    assert counts[0] == counts[2] < counts[1]


@pytest.mark.slow
def test_whether_a_model_thinks_unasked_is_a_flag(model: Path, tmp_path: Path) -> None:
    """With ``--messages-default-thinking template`` the template decides if the request does not."""
    template = tmp_path / "thinking.jinja"
    template.write_text("{{ 'hello ' * (9 if enable_thinking is defined else 5) }}")
    flags = ("--chat-template", str(template), "--messages-default-thinking", "template")
    with running_server(model, "--num-gpu-blocks-override", "400", *flags) as server:
        body = {"messages": HELLO}
        count = httpx.post(f"{server.url}/v1/messages/count_tokens", json=body, timeout=30).json()
        asked = httpx.post(
            f"{server.url}/v1/messages/count_tokens",
            json={**body, "thinking": {"type": "disabled"}},
            timeout=30,
        ).json()
    assert count["input_tokens"] < asked["input_tokens"]


@pytest.mark.slow
def test_a_stream_that_fails_says_so(model: Path) -> None:
    """If the core dies in mid-stream, the last event is an error in Anthropic's shape."""
    request: Body = {"model": "tiny", "max_tokens": 1000, "messages": HELLO}
    with (
        running_server(model, "--num-gpu-blocks-override", "400") as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as claude,
        claude.messages.stream(**request, extra_body={"ignore_eos": True}) as stream,
    ):
        assert next(stream).type == "message_start"
        os.kill(server.core_pid(), signal.SIGKILL)
        with pytest.raises(anthropic.APIStatusError) as failed:
            list(stream)
    assert failed.value.type == "overloaded_error"
    assert isinstance(failed.value.body, dict)
    assert failed.value.body["request_id"] == failed.value.request_id


def test_tokens_can_be_counted_by_the_library(claude: anthropic.Anthropic) -> None:
    """The library's own method counts the tokens."""
    count = claude.messages.count_tokens(model="tiny", messages=HELLO, tools=[BASH], system="Be terse.")
    assert count.input_tokens > 40


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    """Text ends before the stop sequence, and the answer names the sequence."""
    request: Body = {
        "model": "tiny",
        "max_tokens": 20,
        "messages": HELLO,
        "stop_sequences": ["STOP", "never"],
    }
    message = claude.messages.create(**request, extra_body=replay(http, "one two STOP three"))
    [block] = message.content
    assert block.to_dict()["text"] == "one two "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")


@pytest.mark.parametrize("stop", ["ls", "</tool_call>"], ids=["in the call", "behind the call"])
def test_a_stop_sequence_in_a_call_makes_no_tool_use_of_it(
    claude: anthropic.Anthropic, http: httpx.Client, stop: str
) -> None:
    """An answer that ends at the sequence does not stop with tool_use, streamed or not."""
    request: Body = {"model": "tiny", "max_tokens": 200, "messages": HELLO, "tools": [BASH]}
    request |= {"stop_sequences": [stop], "extra_body": replay(http, CALL_TEXT)}
    whole = claude.messages.create(**request)
    with claude.messages.stream(**request) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        expected = ("stop_sequence", "ls") if stop == "ls" else ("tool_use", None)
        assert (message.stop_reason, message.stop_sequence) == expected


def test_a_prefilled_answer_is_continued(http: httpx.Client) -> None:
    """A last message of the assistant becomes the beginning of the answer."""
    history = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    message = post(http, {"messages": history, "return_token_ids": True, **replay(http, " 7")})
    prompt = http.post("/detokenize", json={"tokens": message["prompt_token_ids"]}).json()["prompt"]
    assert prompt.endswith("The answer is")
    assert message["content"] == [{"type": "text", "text": " 7"}]


def test_a_limit_beyond_the_context_is_the_context(http: httpx.Client) -> None:
    """If an agent requests more tokens than the context has, it gets the rest and the stop reason."""
    message = post(http, {"messages": HELLO, "max_tokens": 64_000, "ignore_eos": True, "temperature": 0})
    assert total_input(message) + message["usage"]["output_tokens"] == 1024
    assert message["stop_reason"] == "model_context_window_exceeded"


def test_no_tokens_at_all(http: httpx.Client) -> None:
    """With max_tokens 0 the prompt is computed for the next request and nothing is generated."""
    body: Body = {"messages": [{"role": "user", "content": "warm me up " * 20}]}
    message = post(http, {**body, "max_tokens": 0})
    assert (message["content"], message["usage"]["output_tokens"]) == ([], 0)
    assert message["stop_reason"] == "max_tokens"
    warmed = post(http, {**body, "max_tokens": 1})["usage"]["cache_read_input_tokens"]
    assert warmed == (total_input(message) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_tools_that_must_not_be_called(http: httpx.Client) -> None:
    """With tool_choice none nothing becomes a call, and the prompt is the same as with tools."""
    body: Body = {"messages": HELLO, "tools": [BASH], "return_token_ids": True, **replay(http, CALL_TEXT)}
    free, none = post(http, body), post(http, {**body, "tool_choice": {"type": "none"}})
    assert none["content"] == [{"type": "text", "text": CALL_TEXT}]
    assert none["stop_reason"] == "end_turn"
    assert none["prompt_token_ids"] == free["prompt_token_ids"]


class Answer(pydantic.BaseModel, extra="forbid"):
    """The schema that the model must fill in."""

    city: Literal["Paris", "Rome"]
    is_sunny: bool


def test_an_answer_of_a_given_form(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    """The answer follows a schema, so that the library parses it; streamed and under the older name too."""
    request: Body = {"model": "tiny", "max_tokens": 800, "messages": HELLO}
    parsed = claude.messages.parse(**request, output_format=Answer)
    assert parsed.parsed_output is not None
    assert parsed.stop_reason == "end_turn"
    with claude.messages.stream(**request, output_format=Answer) as stream:
        assert stream.get_final_message().parsed_output is not None
    format_ = {"type": "json_schema", "schema": Answer.model_json_schema()}
    [block] = post(http, {**request, "output_format": format_})["content"]
    assert Answer.model_validate_json(block["text"]).city in ("Paris", "Rome")


STRICT: list[ToolParam] = [
    {
        "name": name,
        "input_schema": {
            "type": "object",
            "properties": {"command": {"enum": ["ls", "pwd"]}},
            "required": ["command"],
            "additionalProperties": False,
        },
    }
    for name in ("bash", "zsh")
]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "zsh"}])
def test_tools_that_must_be_called(claude: anthropic.Anthropic, choice: Any) -> None:
    """With tool_choice any or tool the reply is a call that fits the tool."""
    choice = {**choice, "disable_parallel_tool_use": True}
    request: Body = {"model": "tiny", "max_tokens": 100, "messages": HELLO, "tools": STRICT}
    whole = claude.messages.create(**request, tool_choice=choice)
    with claude.messages.stream(**request, tool_choice=choice) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        [call] = message.content
        assert message.stop_reason == "tool_use"
        assert call.type == "tool_use"
        assert call.name in ([choice["name"]] if "name" in choice else ["bash", "zsh"])
        assert call.input in ({"command": "ls"}, {"command": "pwd"})


def test_one_call_where_the_client_wants_no_more(http: httpx.Client) -> None:
    """disable_parallel_tool_use keeps only the first call."""
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    two_calls = CALL_TEXT + CALL_TEXT.removeprefix("Let me look.")
    body: Body = {"messages": HELLO, "tools": [BASH], "tool_choice": choice, **replay(http, two_calls)}
    assert [block["type"] for block in post(http, body)["content"]] == ["text", "tool_use"]


@pytest.mark.parametrize(
    ("headers", "fields", "job_id"),
    [
        ({}, {"metadata": {"user_id": "user_ab_account__session_11-22"}}, "11-22"),
        ({}, {"metadata": {"user_id": '{"device_id": "d", "session_id": "33-44"}'}}, "33-44"),
        ({"X-Claude-Code-Session-Id": "55-66"}, {"metadata": {"user_id": "x_session_77"}}, "55-66"),
        ({}, {"job_id": "mine"}, "mine"),
    ],
)
def test_the_job_is_known(http: httpx.Client, headers: dict[str, str], fields: Body, job_id: str) -> None:
    """A session of Claude Code is recognized as a job; the usage has its receipt, streamed too."""
    body: Body = {"messages": HELLO, "max_tokens": 2, **fields}
    receipt = http.post("/v1/messages", json=body, headers=headers).json()["usage"]["receipt"]
    assert receipt["job_id"] == job_id
    http.headers.update(headers)
    *_, end, _ = events(http, body)
    assert end["usage"]["receipt"]["job_id"] == job_id


def test_a_client_that_leaves_ends_its_request(http: httpx.Client) -> None:
    """A disconnect, in a stream or while waiting for a whole answer, leaves nothing running."""
    body: Body = {"messages": HELLO, "max_tokens": 900, "ignore_eos": True}
    with http.stream("POST", "/v1/messages", json={**body, "stream": True}) as response:
        next(response.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/messages", json=body, timeout=0.2)
    deadline = time.monotonic() + 20
    while http.get("/load").json()["server_load"]:
        assert time.monotonic() < deadline


def blocks(*content: object, role: str = "user") -> Body:
    return {"messages": [*HELLO, {"role": role, "content": list(content)}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
TEXT = {"type": "text", "text": "a"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
FORMAT = {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}
BAD_BODIES: list[tuple[Body, str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "system", "content": "a"}]}, "messages"),
    ({"messages": [*HELLO, {"role": "assistant", "content": [CALL]}]}, "messages"),
    (blocks(TEXT, 5), "messages.1.content.1"),
    (blocks(TEXT, {"text": "a"}), "messages.1.content.1.type"),
    (blocks(TEXT, {"type": "text"}), "messages.1.content.1.text"),
    (blocks(TEXT, IMAGE), "messages.1.content.1.type"),
    (blocks({"type": "hologram"}), "messages.1.content.0.type"),
    (blocks(TEXT, role="system") | {"system": [IMAGE]}, "system.0.type"),
    (blocks(CALL | {"input": "x"}, role="assistant"), "messages.1.content.0.input"),
    (blocks(CALL | {"name": 5}, role="assistant"), "messages.1.content.0.name"),
    (blocks({"type": "thinking"}, role="assistant"), "messages.1.content.0.thinking"),
    (blocks({"type": "tool_result"}), "messages.1.content.0.tool_use_id"),
    (blocks(result_of() | {"content": 5}), "messages.1.content.0.content"),
    (blocks({"type": "document", "source": {"type": "base64"}}), "messages.1.content.0.source.type"),
    ({"system": 5}, "system"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
    ({"tools": [5]}, "tools.0"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tools": [BASH, {"input_schema": {}}]}, "tools.1.name"),
    ({"tools": [{**BASH, "description": 5}]}, "tools.0.description"),
    ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools.0.type"),
    ({"tools": [{"type": 5}]}, "tools.0.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [BASH]}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool"}, "tools": [BASH]}, "tool_choice.name"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"output_config": {"effort": "some"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": FORMAT}, "output_config.format.schema"),
    ({"output_format": FORMAT["format"]}, "output_format.schema"),
    ({"job_id": ["a"]}, "job_id"),
    ({"replay_token_ids": [-1]}, "replay_token_ids"),
]


@pytest.mark.parametrize(("body", "field"), BAD_BODIES, ids=[field for _, field in BAD_BODIES])
def test_a_bad_field_is_named(http: httpx.Client, body: Body, field: str) -> None:
    """A bad body gets 400 in Anthropic's shape, with the wrong field in the message."""
    good: Body = {"max_tokens": 2} if body == {} else {"max_tokens": 2, "messages": HELLO}
    answer = http.post("/v1/messages", json=good | body)
    assert answer.status_code == 400
    fault = answer.json()
    assert fault["type"] == "error"
    assert fault["error"]["type"] == "invalid_request_error"
    assert field in fault["error"]["message"]
    assert answer.headers["request-id"] == fault["request_id"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("content", [b"", b"{", b"5", b'{"messages": ' + b"[" * 100_000])
def test_what_is_not_a_request_is_refused(http: httpx.Client, path: str, content: bytes) -> None:
    """Broken JSON is a client error, in Anthropic's shape too."""
    answer = http.post(path, content=content)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_the_client_raises_its_own_errors(claude: anthropic.Anthropic) -> None:
    """The library maps errors to its exceptions; an unknown model's error names the available one."""
    with pytest.raises(anthropic.NotFoundError, match="tiny") as missing:
        claude.messages.create(model="claude-of-another-day", max_tokens=1, messages=HELLO)
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(model="tiny", max_tokens=1, messages=HELLO, extra_body={"temperature": -3})


@pytest.mark.parametrize("stream", [False, True])
def test_overflow_is_said_in_the_words_clients_look_for(http: httpx.Client, stream: bool) -> None:
    """The error has the words and counts that make Claude Code compact its history."""
    messages = [{"role": "user", "content": "word " * 2000}]
    answer = http.post("/v1/messages", json={"messages": messages, "max_tokens": 5, "stream": stream})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    [count] = [int(word) for word in message.partition("too long: ")[2].split()[:1]]
    assert count > 2000
    assert f"is too long: {count} tokens > 1023 maximum" in message


def test_models_are_listed(claude: anthropic.Anthropic) -> None:
    """Model names are listed in the shape that this library reads as well."""
    [model] = claude.models.list().data
    assert (model.type, model.id, model.display_name) == ("model", "tiny", "tiny")
    assert model.created_at.year > 2000
    assert claude.models.retrieve("tiny").id == "tiny"


def test_what_claude_code_adds_is_accepted(http: httpx.Client) -> None:
    """Claude Code's headers and the fields specific to Anthropic's servers are accepted."""
    body: Body = {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": [{**TEXT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}
        ],
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "medium"},
        "betas": ["interleaved-thinking-2025-05-14"],
        "mcp_servers": [],
        "container": None,
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,fine-grained-tool-streaming-2025-05-14",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-app": "cli",
    }
    answer = http.post("/v1/messages?beta=true", json={**body, "max_tokens": 2}, headers=headers)
    assert answer.status_code == 200
