"""Requests of ``vllm bench serve`` 0.33: the model list, a profiler that may be missing, counters before and
after, and streams of which it times each event."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.server import Server, running_server

PROMPT = "the model server keeps what a job will need again " * 3
NUM_TOKENS = 12
ACCEPTED = ("num_accepted_tokens", "num_accepted_tokens_per_pos")
SUFFIX = '{"method": "suffix", "weigh_costs": false}'


@pytest.fixture(scope="module")
def benched(model_folder: Path) -> Iterator[Server]:
    """A server with drafts, for which the client also reports acceptance."""
    with running_server(
        model_folder, "--num-gpu-blocks-override", "400", "--speculative-config", SUFFIX
    ) as running:
        yield running
        assert running.interrupt() == 0


@pytest.fixture
def http(benched: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=benched.url, timeout=60) as client:
        yield client


@dataclass
class Timed:
    """What the client records of one stream."""

    events: int = 0
    """Events that it counts as tokens: the first gives the time to the first token."""
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    done: bool = False


def completions(http: httpx.Client, **more: Any) -> Timed:
    """Sends a completion as its backends ``openai`` and ``vllm`` do."""
    body = {
        "model": http.get("/v1/models").json()["data"][0]["id"],
        "prompt": PROMPT,
        "repetition_penalty": 1.0,
        "max_tokens": NUM_TOKENS,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    timed = Timed()
    for data in events(http, "/v1/completions", body, timed):
        if choices := data.get("choices"):
            timed.events += 1
            timed.text += choices[0].get("text") or ""
        elif usage := data.get("usage"):
            timed.usage = usage
    return timed


def chat(http: httpx.Client, **more: Any) -> Timed:
    """Sends a chat as ``openai-chat`` does: an event counts if its delta has text, or is empty without a
    role."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        "max_completion_tokens": NUM_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    timed = Timed()
    for data in events(http, "/v1/chat/completions", body, timed):
        if choices := data.get("choices"):
            delta = choices[0]["delta"]
            if any(delta.get(key) for key in ("content", "reasoning", "tool_calls")) or (
                delta.get("content") == "" and "role" not in delta
            ):
                timed.events += 1
                timed.text += delta.get("content") or ""
        elif usage := data.get("usage"):
            timed.usage = usage
    return timed


def events(http: httpx.Client, path: str, body: dict[str, Any], timed: Timed) -> Iterator[dict[str, Any]]:
    """Yields the stream's ``data:`` messages; comments are skipped."""
    headers = {"x-request-id": "bench-1a2b3c4d-0"}
    with http.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        for message in filter(None, "".join(answer.iter_text()).split("\n\n")):
            if message.startswith(":"):
                continue
            assert message.startswith("data: ")
            if message == "data: [DONE]":
                timed.done = True
            else:
                yield json.loads(message.removeprefix("data: "))


def drafts(http: httpx.Client) -> dict[str, int]:
    """The client's sums of the series whose names end in ``_total``."""
    sums: dict[str, int] = {}
    for line in http.get("/metrics").text.splitlines():
        if found := re.match(r"vllm:spec_decode_(\w+)_total(?:\{.*\})? (\S+)$", line):
            sums[found[1]] = sums.get(found[1], 0) + int(float(found[2]))
    return sums


def test_its_requests_are_answered_as_it_reads_them(http: httpx.Client) -> None:
    """Completions and chats: an event for the first token, one usage after all choices, then the end; exactly
    the requested tokens where it says so."""
    for ask in (completions, chat):
        timed = ask(http, ignore_eos=True, temperature=0.0)
        assert timed.events >= 1
        assert timed.text
        assert timed.usage["completion_tokens"] == NUM_TOKENS
        assert timed.usage["prompt_tokens"] > 10
        assert timed.done


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": 3},
        {"top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 3},
        {"frequency_penalty": 0.1, "presence_penalty": 0.1, "temperature": 0.7},
        {"prompt": [5, 6, 7, 8]},
    ],
)
def test_so_is_what_its_flags_add(http: httpx.Client, more: dict[str, Any]) -> None:
    assert completions(http, ignore_eos=True, **more).usage["completion_tokens"] == NUM_TOKENS


def test_it_reads_what_became_of_drafts(http: httpx.Client) -> None:
    """Draft counters are read before and after; there is a series for each draft position."""
    before = drafts(http)
    for _ in range(3):
        completions(http, ignore_eos=True, temperature=0.0)
    after = drafts(http)
    assert before.keys() == after.keys()
    assert after.keys() == {"num_drafts", "num_draft_tokens", *ACCEPTED}
    assert after["num_drafts"] > before["num_drafts"]
    accepted, by_place = (after[name] - before[name] for name in ACCEPTED)
    assert accepted == by_place
    assert 0 <= accepted <= after["num_draft_tokens"] - before["num_draft_tokens"]


def test_a_model_is_found_and_a_profiler_is_not(http: httpx.Client, model_folder: Path) -> None:
    """Without ``--model`` it takes the first model, and its ``root`` as tokenizer; without a profiler it
    continues."""
    first = http.get("/v1/models").json()["data"][0]
    assert (first["id"], first["root"]) == ("tiny", str(model_folder))
    for path in ("/start_profile", "/stop_profile"):
        assert http.post(path).status_code == 404
    assert http.get("/health").status_code == 200
