"""Promises of /v1/chat/completions, checked on a real server and model with the openai client."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.api.server import running_server

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
CALL_TEXT = 'Let me look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l"}}\n</tool_call>'


def token_ids(http: httpx.Client, text: str) -> list[int]:
    answer = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    tokens: list[int] = answer.json()["tokens"]
    return tokens


def events(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    """A conversation gets a message, a finish reason and correct token counts."""
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5, temperature=0)
    [choice] = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert answer.usage.prompt_tokens_details is not None


def test_without_a_limit_a_chat_may_fill_the_context(client: openai.OpenAI) -> None:
    """The default limit of a chat is the rest of the context, here 1024 tokens."""
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 1024


@pytest.mark.slow
def test_the_models_own_limit_is_the_default(model: Path, tmp_path: Path) -> None:
    """``max_new_tokens`` of the generation config is the default limit, capped by the remaining context."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    config = {"max_new_tokens": 7, "eos_token_id": []}
    (folder / "generation_config.json").write_text(json.dumps(config))
    flags = ("--num-gpu-blocks-override", "400", "--trust-request-chat-template")
    with running_server(folder, *flags) as own, httpx.Client() as http:

        def num_generated(**fields: object) -> int:
            body = {"messages": HELLO, "ignore_eos": True, **fields}
            answer = http.post(f"{own.url}/v1/chat/completions", json=body, timeout=30).json()
            return int(answer["usage"]["completion_tokens"])

        assert num_generated() == 7
        assert num_generated(max_tokens=9) == 9
        assert num_generated(replay_token_ids=[5] * 8) == 8
        assert num_generated(chat_template="{{ '!' * 1020 }}") == 4
        assert own.interrupt() == 0


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    """The chunks of a stream add up to the answer that is not streamed."""
    whole = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=20, temperature=0, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        "length"
    ]
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_on_the_wire(http: httpx.Client) -> None:
    """Usage comes in a last chunk without choices, then [DONE]."""
    body = {"messages": HELLO, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"]["completion_tokens"] == 3
    assert all("usage" not in json.loads(chunk) for chunk in chunks)


def test_usage_in_every_chunk(http: httpx.Client) -> None:
    """With ``continuous_usage_stats`` every chunk has the usage so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HELLO, "max_tokens": 3, "stream": True, "stream_options": options}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        *chunks, _ = events(response)
    counts = [json.loads(chunk)["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_several_answers(client: openai.OpenAI) -> None:
    """n answers are numbered, and a seed makes them reproducible."""

    def ask() -> dict[int, str | None]:
        answer = client.chat.completions.create(model="tiny", messages=HELLO, n=3, max_tokens=8, seed=1)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 24
        return {choice.index: choice.message.content for choice in answer.choices}

    first = ask()
    assert sorted(first) == [0, 1, 2]
    assert len(set(first.values())) > 1
    assert ask() == first


def test_several_answers_streamed(client: openai.OpenAI) -> None:
    """Each streamed answer has its own role and its own finish reason."""
    chunks = list(
        client.chat.completions.create(model="tiny", messages=HELLO, n=2, max_tokens=4, seed=1, stream=True)
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert sorted(choice.index for choice in choices if choice.delta.role) == [0, 1]
    assert sorted(choice.index for choice in choices if choice.finish_reason) == [0, 1]


def test_log_probabilities(client: openai.OpenAI) -> None:
    """Each token comes with its log probability and the most probable others, best first."""
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for position in logprobs.content:
        values = [top.logprob for top in position.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert position.logprob == values[0]  # greedy
        assert len(values) == 3


def test_tokens_that_share_a_character_have_their_bytes_of_it(http: httpx.Client) -> None:
    """The bytes of all tokens together are the text, also where tokens share a character."""
    text = "é😀 ok"
    body = {"messages": HELLO, "replay_token_ids": token_ids(http, text), "logprobs": True, "top_logprobs": 5}
    positions = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(position["bytes"]) for position in positions) == text.encode()
    split = [position for position in positions if position["token"] == "\ufffd"]
    assert split
    assert all(position["bytes"] != list("\ufffd".encode()) for position in split)
    known = {position["token"]: position["bytes"] for position in positions if position["token"] != "\ufffd"}
    for position in positions:
        for top in position["top_logprobs"]:
            assert top["bytes"] == known.get(top["token"], top["bytes"])
            assert bytes(top["bytes"]).decode(errors="replace").startswith(top["token"][:1])


def test_a_stop_string_ends_the_answer(client: openai.OpenAI, http: httpx.Client) -> None:
    """Text ends before the stop string, and the answer reports which one matched."""
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        stop=["STOP", "never"],
        extra_body={"replay_token_ids": token_ids(http, "one two STOP three")},
    )
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].to_dict()["stop_reason"] == "STOP"


def test_tool_calls_are_read(client: openai.OpenAI, http: httpx.Client) -> None:
    """A Hermes call in the reply becomes a tool call; the text before it stays content."""
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        tools=[TOOL],
        extra_body={"replay_token_ids": token_ids(http, CALL_TEXT + "<|im_end|>")},
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("bash", '{"command": "ls -l"}')
    assert call.id


FUNCTION = TOOL["function"]


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({}, "function.name"),
        ({"type": "function"}, "function.name"),
        ({"type": "function", "function": {}}, "function.name"),
        ({"type": "function", "function": {"name": ""}}, "function.name"),
        ({"type": "function", "function": {**FUNCTION, "parameters": 5}}, "function.parameters"),
        ({"type": "function", "function": {**FUNCTION, "description": 5}}, "function.description"),
        ({"type": "custom", "custom": {"name": "patch"}}, "type"),
        ({"type": "web_search"}, "type"),
        ({"type": 5, "function": FUNCTION}, "type"),
    ],
)
def test_a_tool_that_is_no_function_is_refused(
    http: httpx.Client, choice: str, tool: dict[str, object], field: str
) -> None:
    """A tool without a valid function is refused for any ``tool_choice``: the model would see it."""
    body = {"messages": HELLO, "tools": [TOOL, tool], "tool_choice": choice, "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"tools[1].{field}"
    assert f"tools[1].{field}" in answer.json()["error"]["message"]


def test_a_tool_may_leave_out_what_says_nothing(http: httpx.Client) -> None:
    """A tool's type, parameters and description are optional; an empty object may be an empty list (PHP)."""
    functions = [
        {"name": "a"},
        {"name": "b", "parameters": None, "description": None},
        {"name": "c", "parameters": []},
    ]
    tools = [{"function": function} for function in functions]
    body = {"messages": HELLO, "tools": tools, "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("stop", ["ls", "</tool_call>"], ids=["in the call", "behind the call"])
def test_a_stop_string_in_a_call_makes_no_whole_call_of_it(http: httpx.Client, stop: str) -> None:
    """A call cut by a stop string does not finish with "tool_calls", whole or streamed."""
    ids = token_ids(http, CALL_TEXT + "<|im_end|>")
    body = {"messages": HELLO, "tools": [TOOL], "stop": [stop], "replay_token_ids": ids}
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        chunks = [json.loads(event) for event in events(response) if event != "[DONE]"]
    deltas = [chunk["choices"][0] for chunk in chunks]
    calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == arguments
    assert arguments == ('{"command": "' if stop == "ls" else '{"command": "ls -l"}')
    assert (
        choice["finish_reason"] == deltas[-1]["finish_reason"] == ("stop" if stop == "ls" else "tool_calls")
    )
    assert choice["stop_reason"] == stop


def test_tool_calls_are_streamed(client: openai.OpenAI, http: httpx.Client) -> None:
    """The first delta of a call has id and name, the later ones argument text only."""
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            tools=[TOOL],
            stream=True,
            extra_body={"replay_token_ids": token_ids(http, CALL_TEXT + "<|im_end|>")},
        )
    )
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    functions = [delta.function for delta in deltas if delta.function is not None]
    assert deltas[0].id
    assert functions[0].name == "bash"
    assert all(delta.id is None for delta in deltas[1:])
    assert len(deltas) > 1
    assert "".join(function.arguments or "" for function in functions) == '{"command": "ls -l"}'
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me look."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(("parallel", "expected"), [(None, 2), (True, 2), (False, 1)])
def test_one_call_where_the_client_wants_no_more(
    http: httpx.Client, parallel: bool | None, expected: int
) -> None:
    """``parallel_tool_calls: false`` keeps the first call only, streamed or not; the default keeps all."""
    replay = token_ids(http, CALL_TEXT + CALL_TEXT.removeprefix("Let me look.") + "<|im_end|>")
    body = {
        "messages": HELLO,
        "tools": [TOOL],
        "parallel_tool_calls": parallel,
        "replay_token_ids": replay,
    }
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == expected
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        chunks = [json.loads(event) for event in events(response) if event != "[DONE]"]
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert {delta["index"] for delta in deltas} == set(range(expected))
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["none", None])
def test_without_tools_the_text_is_left_alone(http: httpx.Client, choice: str | None) -> None:
    """Without tools, or with tool_choice none, nothing is parsed."""
    body: dict[str, object] = {"messages": HELLO, "replay_token_ids": token_ids(http, CALL_TEXT)}
    if choice is not None:
        body |= {"tools": [TOOL], "tool_choice": choice}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == CALL_TEXT
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_history_with_tool_results_is_accepted(client: openai.OpenAI) -> None:
    """Histories of agents are accepted: calls without content, tool results, lists of text parts."""
    history: list[ChatCompletionMessageParam] = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "You are"}, {"type": "text", "text": "terse."}],
        },
        {"role": "user", "content": "list the files"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"command": "ls"}'},
                },
                {"id": "c2", "type": "function", "function": {"name": "bash", "arguments": "{broken"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "error"}]},
    ]
    answer = client.chat.completions.create(model="tiny", messages=history, tools=[TOOL], max_tokens=2)
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("arguments", ["{broken", "[" * 5000, "5"], ids=["cut off", "too deep", "no object"])
def test_a_history_with_a_bad_call_is_still_served(http: httpx.Client, arguments: str) -> None:
    """A history with invalid arguments in a call is still served."""
    call = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "The arguments are no JSON object."},
    ]
    body = {"messages": messages, "max_tokens": 1, "chat_template": "{{ messages[-1].content }}"}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


UNPRINTABLE = {
    "half of a surrogate pair": '{"command": "\\ud800"}',
    "in a name": '{"\\udfff": 1}',
    "deep": '{"command": ' + "[" * 500 + "]" * 500 + "}",
    "too deep to read": '{"command": ' + "[" * 50_000 + "]" * 50_000 + "}",
}


@pytest.mark.parametrize("arguments", UNPRINTABLE.values(), ids=UNPRINTABLE.keys())
def test_arguments_that_no_template_can_print_stay_text(http: httpx.Client, arguments: str) -> None:
    """Arguments with escapes that no text encoding can represent are rendered as the model wrote them."""
    call = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = http.post("/tokenize", json={"messages": messages})
    assert answer.status_code == 200, answer.text
    text = http.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]
    assert arguments in text


HALF = UNPRINTABLE["half of a surrogate pair"]
RESULT = {"role": "tool", "tool_call_id": "c", "content": "x"}
HISTORIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {
        "messages": [
            *HELLO,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": HALF}},
                ],
            },
            RESULT,
        ],
        "max_tokens": 1,
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": "hello"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": HALF},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "max_output_tokens": 1,
    },
    "/v1/messages": {
        "messages": [
            *HELLO,
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"INVALID_JSON": HALF}}
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}],
            },
        ],
        "max_tokens": 1,
    },
}
HISTORIES["/v1/messages/count_tokens"] = HISTORIES["/v1/messages"]


@pytest.mark.parametrize("path", HISTORIES)
def test_half_of_a_surrogate_pair_in_a_call_ends_no_job(http: httpx.Client, path: str) -> None:
    """In every API a history with half of a surrogate pair in a call is served."""
    answer = http.post(path, json=HISTORIES[path])
    assert answer.status_code == 200, answer.text


def test_a_call_sent_back_continues_the_same_tokens(http: httpx.Client) -> None:
    """A reply with a call, sent back as messages, renders to the tokens it was generated as."""
    body = {"messages": HELLO, "tools": [TOOL], "replay_token_ids": token_ids(http, CALL_TEXT + "<|im_end|>")}
    answer = http.post("/v1/chat/completions", json={**body, "return_token_ids": True}).json()
    tip = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
    history = [*HELLO, answer["choices"][0]["message"], {"role": "tool", "content": "a.txt"}]
    tokens = http.post("/tokenize", json={"messages": history, "tools": [TOOL]}).json()["tokens"]
    assert tokens[: len(tip)] == tip


def test_token_ids_on_request(http: httpx.Client) -> None:
    """return_token_ids returns the tokens of prompt and answer, in a stream too."""
    body = {"messages": HELLO, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    whole = http.post("/v1/chat/completions", json=body).json()
    assert whole["prompt_token_ids"] == http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        *chunks, _ = [json.loads(event) for event in events(response) if event != "[DONE]"]
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert streamed == whole["choices"][0]["token_ids"]


def test_continuing_the_last_message(http: httpx.Client) -> None:
    """With continue_final_message the model continues the assistant's last message."""
    history = [*HELLO, {"role": "assistant", "content": "I would"}]
    body = {"messages": history, "continue_final_message": True, "add_generation_prompt": False}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.endswith("I would")
    answer = http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
    assert answer.json()["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize("sent", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content", "thinking"])
def test_a_thought_sent_back_reaches_any_template(http: httpx.Client, sent: str, read: str) -> None:
    """Reasoning sent back under any of its three names reaches the template under the name it reads."""
    body = {
        "messages": [{"role": "assistant", "content": "", sent: "so it is"}],
        "chat_template": f"{{{{ messages[0].{read} }}}}",
    }
    assert http.post("/tokenize", json=body).json()["tokens"] == token_ids(http, "so it is")


def test_forbidding_calls_changes_no_token_of_the_prompt(http: httpx.Client) -> None:
    """Forbidding tool calls does not change the prompt, so the prefix is still found."""
    body = {"messages": HELLO, "tools": [TOOL], "max_tokens": 1, "return_token_ids": True}
    free, bound = (
        http.post("/v1/chat/completions", json={**body, "tool_choice": choice}).json()
        for choice in ("auto", "none")
    )
    assert free["prompt_token_ids"] == bound["prompt_token_ids"]
