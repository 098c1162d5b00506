"""Promises about bad requests: one error shape, the right status, the field named, and never a 500."""

from __future__ import annotations

import re

import httpx
import openai
import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]

BAD_BODIES: list[tuple[str, dict[str, object], int, str | None]] = [
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hello"}, 400, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": IMAGE}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [5]}]}, 400, "messages[0].tool_calls[0]"),
    (CHAT, {"messages": HELLO, "model": "other"}, 404, "model"),
    (CHAT, {"messages": HELLO, "temperature": "hot"}, 400, "temperature"),
    (CHAT, {"messages": HELLO, "temperature": -1}, 400, "temperature"),
    (CHAT, {"messages": HELLO, "top_p": 0}, 400, "top_p"),
    (CHAT, {"messages": HELLO, "top_k": -5}, 400, "top_k"),
    (CHAT, {"messages": HELLO, "min_p": 2}, 400, "min_p"),
    (CHAT, {"messages": HELLO, "presence_penalty": 3}, 400, "presence_penalty"),
    (CHAT, {"messages": HELLO, "repetition_penalty": 0}, 400, "repetition_penalty"),
    (CHAT, {"messages": HELLO, "n": 0}, 400, "n"),
    (CHAT, {"messages": HELLO, "n": 10**30}, 400, "n"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": 10**30}, 400, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": 5000}, 400, "max_tokens"),
    (CHAT, {"messages": HELLO, "min_tokens": 9, "max_tokens": 5}, 400, "min_tokens"),
    (CHAT, {"messages": HELLO, "seed": 2**70}, 400, "seed"),
    (CHAT, {"messages": HELLO, "stop": [""]}, 400, "stop"),
    (CHAT, {"messages": HELLO, "stop": 7}, 400, "stop"),
    (CHAT, {"messages": HELLO, "stop": "x" * 70_000}, 400, "stop"),
    (CHAT, {"messages": HELLO, "bad_words": ["x"] * 2000}, 400, "bad_words"),
    (CHAT, {"messages": HELLO, "logit_bias": {str(i): 1 for i in range(20_000)}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "metadata": {"a": [1, 10**25]}}, 400, "metadata.a[1]"),
    (CHAT, {"messages": HELLO, "stop_token_ids": [10**9]}, 400, "stop_token_ids"),
    (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "allowed_token_ids": []}, 400, "allowed_token_ids"),
    (CHAT, {"messages": HELLO, "bad_words": [""]}, 400, "bad_words"),
    (CHAT, {"messages": HELLO, "replay_token_ids": [-1]}, 400, "replay_token_ids"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 50}, 400, "top_logprobs"),
    (CHAT, {"messages": HELLO, "top_logprobs": 5}, 400, "top_logprobs"),
    (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": "always"}, 400, "tool_choice"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": HELLO, "tool_choice": "auto"}, 400, "tool_choice"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_format"),
    (CHAT, {"messages": HELLO, "guided_json": {"type": "object"}}, 400, "guided_json"),
    (CHAT, {"messages": HELLO, "job_id": ""}, 400, "job_id"),
    (CHAT, {"messages": HELLO, "job_id": "x" * 1000}, 400, "job_id"),
    (CHAT, {"messages": HELLO, "vllm_xargs": {"job_id": ["a"]}}, 400, "vllm_xargs"),
    (CHAT, {"messages": HELLO, "chat_template": "{{ raise_exception('no') }}"}, 400, "messages"),
    (CHAT, {"messages": HELLO, "chat_template": "{{ unclosed"}, 400, "messages"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [10**9]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 5000}, 400, "prompt"),
    (COMPLETIONS, {"prompt": {"text": "a"}}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, 400, "echo"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 50}, 400, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, 400, "best_of"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": -1}, 400, "max_tokens"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [10**8]}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
]


CODES = {
    (404, "model", False): "model_not_found",
    (400, "max_tokens", True): "context_length_exceeded",
    (400, "prompt", True): "context_length_exceeded",
}
"""OpenAI's codes for errors that clients act on; for all others the code is the status."""


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD_BODIES)
def test_a_bad_field_is_named(
    http: httpx.Client, path: str, body: dict[str, object], status: int, param: str | None
) -> None:
    """Each bad body gets its status, in OpenAI's shape, with the field that is to blame."""
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert error["code"] == CODES.get((status, error["param"], "maximum context" in error["message"]), status)
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")
    assert error["message"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "a"}], "x": '
        + b'{"a":' * 10_000
        + b"1"
        + b"}" * 10_000
        + b"}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
def test_what_is_not_a_request_is_refused(http: httpx.Client, path: str, body: bytes) -> None:
    """Broken JSON, broken text and endless nesting are reported as client errors."""
    answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"


def test_not_a_number_is_refused(http: httpx.Client) -> None:
    """NaN is neither JSON nor a temperature."""
    body = b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}'
    answer = http.post(CHAT, content=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


def test_a_grammar_that_leaves_no_way_is_the_requests_fault(http: httpx.Client) -> None:
    """A grammar that excludes every allowed token is a client error."""
    wanted = {"structured_outputs": {"regex": "[0-9]+"}, "allowed_token_ids": [3]}
    answer = http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 5, **wanted})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs.regex")


def test_an_error_does_not_echo_the_request(http: httpx.Client) -> None:
    """The error for a large bad body is small."""
    deep: object = 10**30
    for _ in range(100):
        deep = {"z" * 10_000: deep}
    for body in (
        {"messages": ["x" * 10_000] * 200, "temperature": "y" * 100_000},
        {"messages": HELLO, "metadata": deep},
        {"messages": HELLO, "model": "m" * 100_000},
    ):
        answer = http.post(CHAT, json=body)
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 4000


@pytest.mark.parametrize("stream", [False, True])
def test_overflow_is_said_in_the_words_clients_look_for(http: httpx.Client, stream: bool) -> None:
    """A prompt beyond the context gives 400 and mentions the maximum context length."""
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "word " * 2000}]}),
        (COMPLETIONS, {"prompt": [5] * 2000}),
    ):
        answer = http.post(path, json={**body, "stream": stream})
        assert answer.status_code == 400
        assert "maximum context length" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/messages", CHAT, "/v1/responses"])
@pytest.mark.parametrize("is_counted", [True, False])
def test_a_prompt_far_too_long_is_refused(http: httpx.Client, path: str, is_counted: bool) -> None:
    """The error states the exact number of tokens, since clients read it; a prompt of megabytes, which takes
    seconds to tokenize, gets an error without a number."""
    text = "x " * (45_000 if is_counted else 700_000)
    where = {COMPLETIONS: "prompt", "/v1/responses": "input"}.get(path, "messages")
    body = {where: [{"role": "user", "content": text}] if where == "messages" else text}
    answer = http.post(path, json={**body, **({"max_tokens": 2} if path == "/v1/messages" else {})})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "maximum context length is 1024 tokens, but the prompt is too long: " in message
    said = re.search(r"too long: (\d+) tokens > 1023 maximum", message)
    assert (said is not None) == is_counted
    if said is None:
        assert not re.search(r"\d+ tokens", message.partition("too long")[2])
    elif path == "/v1/messages":
        assert int(said[1]) == http.post(f"{path}/count_tokens", json=body).json()["input_tokens"]
    elif path == COMPLETIONS:
        assert int(said[1]) == http.post("/tokenize", json=body).json()["count"]


def test_a_text_far_too_long_may_still_be_counted(http: httpx.Client) -> None:
    """A text beyond the context can still be counted: clients may shorten a prompt by the count."""
    text = "x " * 45_000
    assert http.post("/tokenize", json={"prompt": text}).json()["count"] > 40_000
    body = {"messages": [{"role": "user", "content": text}]}
    assert http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"] > 40_000


LOGPROBS = {"logprobs": True, "top_logprobs": 21}
TOO_LONG = [{"role": "user", "content": "word " * 2000}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "name", "limit"),
    [
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "at least 1"),
        (CHAT, {"max_completion_tokens": 5000}, "max_completion_tokens", "1024 tokens"),
        (CHAT, LOGPROBS, "top_logprobs", "[0, 20]"),
        (CHAT, {"messages": TOO_LONG}, "messages", "1024 tokens"),
        (CHAT, {"tools": [], "tool_choice": 5}, "tool_choice", "'auto'"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "a list of token ids"),
        (COMPLETIONS, {"prompt": 5}, "prompt", "a string"),
        ("/v1/messages", {"stop_sequences": ["x" * 2000]}, "stop_sequences", "1024"),
        ("/v1/messages", {"messages": TOO_LONG}, "messages", "1023 maximum"),
        ("/v1/messages", {"system": ["x"]}, "system", "text blocks"),
    ],
)
def test_what_is_wrong_has_the_name_it_was_sent_by(
    http: httpx.Client, path: str, fields: dict[str, object], name: str, limit: str, stream: bool
) -> None:
    """Errors name the field as the client sent it, not the engine's field nor a variant of a union."""
    body = {**({"prompt": "a"} if path == COMPLETIONS else {"messages": HELLO}), "stream": stream, **fields}
    if path == "/v1/messages":
        body = {"max_tokens": 2, **body}
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert limit in error["message"]
    assert error["message"].startswith(name) if path == "/v1/messages" else error["param"] == name
    assert (
        not re.search(r"^(max_tokens|logprobs|stop)\b|\.str|render", error["message"]) or name == "max_tokens"
    )


def test_the_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    """The openai client maps error responses to its exceptions."""
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="a", temperature=-3)


def test_unknown_fields_and_nulls_are_ignored(http: httpx.Client) -> None:
    """Unknown fields and nulls are ignored, so that clients of other servers run unchanged."""
    body = {
        "messages": HELLO,
        "max_tokens": 1,
        "some_future_field": {"x": 1},
        "temperature": None,
        "stop": None,
    }
    extra = {"response_format": {"type": "text"}, "store": False, "metadata": {}, "parallel_tool_calls": True}
    assert http.post(CHAT, json={**body, **extra}).status_code == 200


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    """Unknown paths and methods get errors in OpenAI's shape."""
    missing = http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")
    wrong = http.get(CHAT)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, 405)
