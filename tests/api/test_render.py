"""Promises of the render endpoints: the prompt is that of the request itself, and nothing is generated."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.test_chat import HELLO, TOOL

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
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
    params = prompt["sampling_params"]
    assert params["top_p"] == 1.0, "defaults are told: another server may have others"
    alone = http.post(COMPLETIONS, json={"prompt": prompt["token_ids"], "return_token_ids": True, **params})
    chat = http.post(CHAT, json={**asked, "return_token_ids": True}).json()
    assert alone.json()["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]


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
    ],
)
def test_what_would_be_refused_is_not_rendered(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, field: str
) -> None:
    """The errors are those of the request itself."""
    of_render, of_request = (http.post(each, json=body) for each in (f"{path}/render", path))
    assert (of_render.status_code, of_render.json()["error"]["param"]) == (status, field)
    assert of_render.json() == of_request.json()
