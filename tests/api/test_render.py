"""Promises of the endpoints for gateways: prompts as token ids, and answers to them as token ids."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api.test_chat import HELLO, TOOL, events

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    *HELLO,
    {"role": "assistant", "content": "hi", "reasoning": "so it is"},
    {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "now?"}]},
]


def rendered(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(f"{path}/render", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": "none", "reasoning_effort": "low"},
        {"messages": HISTORY, "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [*HELLO, {"role": "assistant", "content": "I"}], "continue_final_message": True},
    ],
)
def test_a_chat_renders_to_its_own_prompt(http: httpx.Client, more: dict[str, Any]) -> None:
    body = {"messages": HELLO, **GREEDY, **more}
    prompt = rendered(http, CHAT, **body)
    answer = http.post(CHAT, json=body).json()
    assert prompt["token_ids"] == answer["prompt_token_ids"]
    assert prompt["features"] is None
    assert prompt["model"] == answer["model"]
    assert prompt["request_id"].startswith("chatcmpl-")
    assert prompt["sampling_params"]["max_tokens"] == 6
    assert "structured_outputs" not in prompt["sampling_params"], "V1 has no word for this engine's grammar"


def test_prompts_of_a_completion_render_in_their_order(http: httpx.Client) -> None:
    texts, tokens = ["one two three", "def main"], [[7, 8, 9], [5]]
    for prompts in (texts, tokens, texts[0], tokens[0]):
        first, *others = rendered(http, COMPLETIONS, prompt=prompts)
        choices = http.post(COMPLETIONS, json={"prompt": prompts, **GREEDY}).json()["choices"]
        got = [prompt["token_ids"] for prompt in (first, *others)]
        assert got == [choice["prompt_token_ids"] for choice in choices]
        assert first["sampling_params"]["max_tokens"] == 16
        assert len({prompt["request_id"] for prompt in (first, *others)}) == len(got)


def test_a_rendered_chat_can_be_generated_from_its_tokens(http: httpx.Client) -> None:
    """The tokens and parameters, sent on as they are, give the answer of the chat."""
    asked: dict[str, Any] = {"messages": HISTORY, "max_tokens": 8, "temperature": 0.8, "seed": 11}
    asked |= {"structured_outputs": {"regex": "[a-z]{3,40}"}, "stop_token_ids": [3], "top_k": 30}
    asked["chat_template_kwargs"] = {"enable_thinking": False}
    prompt = rendered(http, CHAT, **asked)
    assert prompt["sampling_params"]["top_p"] == 1.0, "defaults are told: another server may have others"
    answer = http.post(GENERATE, json=prompt).json()
    chat = http.post(CHAT, json={**asked, "return_token_ids": True}).json()
    assert answer["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    assert answer["choices"][0]["finish_reason"] == chat["choices"][0]["finish_reason"]
    assert answer["request_id"] == prompt["request_id"]
    assert answer["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"]


def test_tokens_in_tokens_out(http: httpx.Client) -> None:
    """Whole or streamed, the tokens, log-probabilities and ends are those of a completion."""
    params: dict[str, Any] = {**GREEDY, "n": 2, "logprobs": 1, "prompt_logprobs": 0}
    del params["return_token_ids"]
    body = {"token_ids": [7, 8, 9, 10], "sampling_params": params, "request_id": "mine"}
    whole = http.post(GENERATE, json=body).json()
    of_completion = {**params, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choices = http.post(COMPLETIONS, json={"prompt": body["token_ids"], **of_completion}).json()["choices"]
    assert [each["token_ids"] for each in whole["choices"]] == [each["token_ids"] for each in choices]
    for got, wanted in zip(whole["choices"], choices, strict=True):
        said = got["logprobs"]["content"]
        assert [each["token"] for each in said] == wanted["logprobs"]["tokens"]
        assert [each["logprob"] for each in said] == wanted["logprobs"]["token_logprobs"]
    assert whole["prompt_logprobs"] == choices[0]["prompt_logprobs"]
    params.pop("prompt_logprobs")
    params |= {"temperature": 1.0, "seed": 3, "n": 4, "stop_token_ids": list(range(100, 300))}
    whole = http.post(GENERATE, json=body).json()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}, "job_id": "by-tokens"}
    with http.stream("POST", GENERATE, json=streamed) as response:
        *chunks, last, done = events(response)
    assert done == "[DONE]"
    assert json.loads(last)["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert json.loads(last)["usage"]["receipt"]["job_id"] == "by-tokens"
    told: dict[int, list[int]] = {index: [] for index in range(4)}
    ends: dict[int, str] = {}
    for chunk in map(json.loads, chunks):
        assert chunk["request_id"] == "mine"
        for choice in chunk["choices"]:
            assert choice["index"] not in ends, "nothing follows the end of an answer"
            told[choice["index"]] += choice["token_ids"]
            if choice["finish_reason"] is not None:
                ends[choice["index"]] = choice["finish_reason"]
    assert [*told.values()] == [each["token_ids"] for each in whole["choices"]]
    assert ends == {each["index"]: each["finish_reason"] for each in whole["choices"]}
    assert len(set(map(len, told.values()))) > 1, "answers end at different times"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [2**30]}, "token_ids"),
        ({"token_ids": [7] * 5000}, "token_ids"),
        ({"token_ids": "a text"}, "token_ids"),
        ({"token_ids": [7], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [7], "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"token_ids": [7], "sampling_params": {"best_of": 2}}, "best_of"),
        ({"token_ids": [7], "sampling_params": 3}, "sampling_params"),
        ({"token_ids": [7], "sampling_params": None}, "sampling_params"),
        ({"token_ids": [7], "features": {"mm_hashes": {}}}, "features"),
        ({"token_ids": [7], "job_id": [1]}, "job_id"),
    ],
)
def test_tokens_that_cannot_be_continued_are_refused(
    http: httpx.Client, body: dict[str, Any], field: str
) -> None:
    answer = http.post(GENERATE, json={"sampling_params": {"max_tokens": 1}, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


def test_sampling_parameters_name_no_job(http: httpx.Client) -> None:
    """The fields of a request are not read from its sampling parameters, nor the other way round."""
    params = {"max_tokens": 1, "job_id": "smuggled", "stream": True, "echo": True, "prompt": [5]}
    answer = http.post(GENERATE, json={"token_ids": [7], "sampling_params": params, "max_tokens": 9}).json()
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["completion_tokens"] == 1
    assert http.get("/v1/jobs/smuggled").status_code == 404


def test_what_belongs_to_a_request_stays_with_its_tokens(http: httpx.Client) -> None:
    """Sent on, they find KV of the same salt only, and are streamed where that was asked."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "salted " * 40}], "max_tokens": 1}
    salted = rendered(http, CHAT, **asked, cache_salt="secret", priority=3)
    plain = rendered(http, CHAT, **asked)
    assert (salted["cache_salt"], salted["priority"], salted["stream"]) == ("secret", 3, False)
    assert "cache_salt" not in plain
    cached = []
    for prompt in (salted, plain, salted):
        usage = http.post(GENERATE, json={**prompt, "priority": 0}).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] == [0, 0]
    assert cached[2] > 0
    streamed = rendered(http, CHAT, **asked, stream=True, stream_options={"include_usage": True})
    with http.stream("POST", GENERATE, json=streamed) as response:
        *_, last, done = events(response)
    assert done == "[DONE]"
    assert json.loads(last)["usage"]["completion_tokens"] == 1


def test_a_rendering_begins_no_job(http: httpx.Client) -> None:
    rendered(http, CHAT, messages=HELLO, job_id="only-rendered")
    rendered(http, COMPLETIONS, prompt="hi", job_id="only-rendered")
    assert http.get("/v1/jobs/only-rendered").status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "messages"),
        (CHAT, {"messages": HELLO, "temperature": 1000}, 400, "temperature"),
        (CHAT, {"messages": HELLO, "model": "another"}, 404, "model"),
        (CHAT, {"messages": []}, 400, "messages"),
        (COMPLETIONS, {"prompt": [7] * 5000}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [2**30]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
        (COMPLETIONS, {"prompt": "hi", "top_p": 2}, 400, "top_p"),
        (COMPLETIONS, {"prompt": "hi", "bad_words": ["x"] * 2000}, 400, "bad_words"),
        (
            COMPLETIONS,
            {"prompt": "hi", "structured_outputs": {"regex": "("}},
            400,
            "structured_outputs.regex",
        ),
        (
            CHAT,
            {"messages": HELLO, "structured_outputs": {"regex": "(?=a)"}},
            400,
            "structured_outputs.regex",
        ),
        (CHAT, {"messages": HELLO, "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ],
)
def test_what_would_be_refused_is_not_rendered(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, field: str
) -> None:
    """The errors are those of the request itself."""
    of_render, of_request = (http.post(each, json=body) for each in (f"{path}/render", path))
    assert (of_render.status_code, of_render.json()["error"]["param"]) == (status, field)
    assert of_render.json() == of_request.json()
