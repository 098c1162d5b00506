"""``deadline_s``: a request ends when its answer is of no use any more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

LONG = {"max_tokens": 900, "ignore_eos": True}
MESSAGES: list[dict[str, str]] = [{"role": "user", "content": "Count."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Count.", **LONG},
    "/v1/chat/completions": {"messages": MESSAGES, **LONG},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, **LONG},
    "/v1/responses": {"input": "Count.", "max_output_tokens": 900, "ignore_eos": True},
}
TOO_SOON = 0.05
"""Seconds in which no machine makes 900 tokens."""
FAULT = "deadline_s must be a number of seconds from 0.001 to 86400"


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_comes_too_late_is_504(http: httpx.Client, path: str) -> None:
    """The error names the field and its value, and nothing is left of the request."""
    answer = http.post(path, json={**BODIES[path], "deadline_s": TOO_SOON})
    assert answer.status_code == 504, answer.text
    assert "its deadline_s, 0.05 s" in answer.text
    length = next(name for name in ("max_tokens", "max_output_tokens") if name in BODIES[path])
    in_time = http.post(path, json={**BODIES[path], "deadline_s": 86_400, length: 16})
    assert in_time.status_code == 200, in_time.text


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_is_too_late_ends_with_an_error(http: httpx.Client, path: str) -> None:
    body = {**BODIES[path], "deadline_s": TOO_SOON, "stream": True}
    with http.stream("POST", path, json=body) as answer:
        text = answer.read().decode()
    assert answer.status_code == 504 or "its deadline_s, 0.05 s" in text


@pytest.mark.parametrize("deadline_s", [0, -1, 0.0009, 86_401, "soon", True, [1], 1e400], ids=str)
@pytest.mark.parametrize("path", BODIES)
def test_a_deadline_is_a_number_of_seconds(http: httpx.Client, path: str, deadline_s: object) -> None:
    content = httpx.Request("POST", "http://x", json={**BODIES[path], "deadline_s": 1}).content
    number = b"1e400" if deadline_s == 1e400 else httpx.Request("POST", "http://x", json=deadline_s).content
    content = content.replace(b'"deadline_s":1', b'"deadline_s":' + number)
    answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert "deadline_s" in answer.text


@pytest.mark.parametrize("path", BODIES)
def test_clients_without_the_field_send_it_in_xargs(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={**BODIES[path], "vllm_xargs": {"deadline_s": TOO_SOON}})
    assert answer.status_code == 504, answer.text
    refused = http.post(path, json={**BODIES[path], "vllm_xargs": {"deadline_s": 0}})
    assert refused.status_code == 400
    assert f"vllm_xargs.{FAULT}" in refused.json()["error"]["message"]


def test_one_late_request_costs_no_other(http: httpx.Client) -> None:
    """Answers beside late requests are those that their prompts have alone."""
    bodies = [
        {"prompt": f"Count {number}.", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
        for number in range(4)
    ]
    alone = [text_of(http.post("/v1/completions", json=body)) for body in bodies]
    late = {**bodies[0], "max_tokens": 900, "deadline_s": TOO_SOON}
    with ThreadPoolExecutor(8) as pool:
        lates = [pool.submit(http.post, "/v1/completions", json=late) for _ in range(4)]
        others = [pool.submit(http.post, "/v1/completions", json=body) for body in bodies]
    assert [each.result().status_code for each in lates] == [504] * 4
    assert [text_of(each.result()) for each in others] == alone


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_a_deadline_counts_from_the_body(http: httpx.Client) -> None:
    """The time in which a prompt is rendered is part of it; the one token alone would be in time."""
    loops = "{% for a in range(90000) %}{% endfor %}" * 40
    body = {"messages": MESSAGES, "max_tokens": 1, "chat_template": f"{loops}Count."}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert http.post("/v1/chat/completions", json={**body, "deadline_s": TOO_SOON}).status_code == 504
