"""Promises to agents: a job's second turn finds what the first computed, and every turn has a receipt."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.server import running_server
from tests.api.test_chat import CALL_TEXT, TOOL, events, token_ids

Body = dict[str, Any]


def two_turns(http: httpx.Client, first: Body, job: Body) -> tuple[Body, Body]:
    """Runs a turn that calls a tool, and the turn with the tool's result."""
    body: Body = {**first, **job, "tools": [TOOL]}
    one = http.post("/v1/chat/completions", json=body).json()
    history = [*first["messages"], one["choices"][0]["message"], {"role": "tool", "content": "a.txt\nb.txt"}]
    two = http.post(
        "/v1/chat/completions", json={"messages": history, "tools": [TOOL], "max_tokens": 4, **job}
    ).json()
    return one, two


@pytest.mark.parametrize("field", ["job_id", "vllm_xargs"])
def test_the_second_turn_finds_the_first(http: httpx.Client, field: str) -> None:
    """cached_tokens of the second turn cover all full blocks of the first turn's prompt and reply."""
    name = f"two-turns-{field}"
    job: Body = {"job_id": name} if field == "job_id" else {"vllm_xargs": {"job_id": name}}
    first: Body = {
        "messages": [{"role": "user", "content": f"{name}: list the files, please, all of them"}],
        "replay_token_ids": token_ids(http, CALL_TEXT + "<|im_end|>"),
    }
    one, two = two_turns(http, first, job)
    assert one["choices"][0]["finish_reason"] == "tool_calls"
    # The KV of the reply's last token is never computed.
    tip = one["usage"]["total_tokens"] - 1
    assert two["usage"]["prompt_tokens_details"]["cached_tokens"] == tip // 16 * 16


def test_every_turn_of_a_job_has_a_receipt(http: httpx.Client) -> None:
    """The receipt says what was cached, what is pinned for the next turn, and for how long."""
    first: Body = {
        "messages": [{"role": "user", "content": "receipts: list the files, please"}],
        "replay_token_ids": token_ids(http, CALL_TEXT + "<|im_end|>"),
    }
    one, two = two_turns(http, first, {"job_id": "receipts"})
    assert (
        one["usage"]["receipt"]["job_id"],
        one["usage"]["receipt"]["turn"],
        two["usage"]["receipt"]["turn"],
    ) == ("receipts", 1, 2)
    assert one["usage"]["receipt"]["request_id"] == one["id"]
    assert one["usage"]["receipt"]["pinned_tokens"] > 0
    assert one["usage"]["receipt"]["ttl_s"] > 0
    assert two["usage"]["receipt"]["previous_pin"] == "handed_over"
    assert two["usage"]["receipt"]["gap_s"] >= 0
    assert two["usage"]["receipt"]["recomputed_tokens"] == 0
    assert two["usage"]["receipt"]["cached_tokens"] == two["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_ends_with_the_receipt(http: httpx.Client, path: str) -> None:
    """The receipt comes with the last chunk and delays no text."""
    prompt: Body = (
        {"prompt": "a b c"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    body = {**prompt, "max_tokens": 4, "stream": True, "job_id": f"stream{path}"}
    body["stream_options"] = {"include_usage": True}
    with http.stream("POST", path, json=body) as response:
        *chunks, last, usage, done = events(response)
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert json.loads(usage)["usage"]["receipt"]["turn"] == 1
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)


def test_the_last_step_holds_nothing(http: httpx.Client) -> None:
    """A turn with ``is_last_step`` leaves no pin."""
    body = {"prompt": "done " * 40, "max_tokens": 2, "job_id": "done", "is_last_step": True}
    receipt = http.post("/v1/completions", json=body).json()["usage"]["receipt"]
    assert receipt["pinned_tokens"] == 0


def test_the_command_of_a_text_agent_is_announced(http: httpx.Client) -> None:
    """A fenced bash block names the tool that runs, and does not change the answer."""
    text = "THOUGHT: look\n\n```bash\nls -l\n```"
    body = {
        "messages": [{"role": "user", "content": "text agent"}],
        "replay_token_ids": token_ids(http, text),
        "job_id": "text-agent",
    }
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == text
    assert "tool_calls" not in answer["choices"][0]["message"]
    assert answer["usage"]["receipt"]["pinned_tokens"] > 0


@pytest.fixture(scope="module")
def fresh(model_folder: Path) -> Iterator[httpx.Client]:
    """A server that holds answers, as it has not learned yet that nothing follows them."""
    with running_server(model_folder) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


def test_equal_prompts_of_a_job_are_branches(fresh: httpx.Client) -> None:
    """Equal prompts, as of sub-agents, are separate branches: numbered by arrival, each pinned and
    continued."""
    body = {"prompt": "look into this, all of you " * 8, "max_tokens": 4, "job_id": "fan-out"}
    answers = [fresh.post("/v1/completions", json=body).json() for _ in range(3)]
    receipts = [answer["usage"]["receipt"] for answer in answers]
    assert [receipt["turn"] for receipt in receipts] == [1, 2, 3]
    assert all(receipt["pinned_tokens"] > 0 and receipt["previous_pin"] is None for receipt in receipts)
    text = body["prompt"] + answers[0]["choices"][0]["text"] + " go on"
    last = fresh.post("/v1/completions", json=body | {"prompt": text}).json()["usage"]["receipt"]
    assert (last["turn"], last["previous_pin"]) == (4, "handed_over")


def test_a_question_that_nobody_named_is_told_that_nothing_is_held(http: httpx.Client) -> None:
    """The receipt has an inferred name by which the job would be known if it went on."""
    answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()
    receipt = answer["usage"]["receipt"]
    assert receipt["job_id"].startswith("inferred-")
    assert (receipt["turn"], receipt["pinned_tokens"], receipt["ttl_s"]) == (1, 0, 0.0)


@pytest.mark.slow
def test_gauges_follow_pins_that_end_while_nothing_runs(fresh: httpx.Client) -> None:
    """When an idle server releases a pin, /metrics shows it without a request to wake the server."""

    def wait_for_pins(expected: float) -> None:
        """Waits for the gauge, which follows the core's report one message after the answer."""
        deadline = time.monotonic() + 20
        while True:
            lines = fresh.get("/metrics").text.splitlines()
            pins = sum(float(line.split()[-1]) for line in lines if line.startswith("continuum:pins{"))
            if pins == expected:
                return
            assert time.monotonic() < deadline, f"the gauge stayed at {pins}"

    fresh.post("/reset_prefix_cache")
    wait_for_pins(0)
    body = {"prompt": "idle " * 40, "max_tokens": 2, "job_id": "idle"}
    receipt = fresh.post("/v1/completions", json=body).json()["usage"]["receipt"]
    assert receipt["ttl_s"] == 2.0  # It called no tool.
    wait_for_pins(1)
    wait_for_pins(0)


@pytest.mark.slow
def test_a_hold_of_centuries_is_waited_for_as_any_other(model: Path) -> None:
    """A pin with a deadline beyond any system clock does not end the core, which waits for it."""
    flags = ("--ttl-rule", "fixed", "--fixed-ttl-s", "1e10", "--max-ttl-s", "inf")
    with running_server(model, "--num-gpu-blocks-override", "300", *flags) as server:
        said = {"prompt": "a long enough prompt " * 8, "job_id": "a", "max_tokens": 4}
        for turn in (1, 2, 3):
            answer = httpx.post(f"{server.url}/v1/completions", json=said, timeout=60).json()
            receipt = answer["usage"]["receipt"]
            assert (receipt["turn"], receipt["pinned_tokens"] > 0) == (turn, True)
            said["prompt"] += answer["choices"][0]["text"] + " go on"


@pytest.mark.slow
def test_at_a_price_of_memory_a_larger_pool_is_held_for_longer(model: Path) -> None:
    """In a pool a hundred times as large the same turn takes a hundredth of the pool, so its pin lasts about
    a hundred times as long."""
    holds_s = []
    for num_blocks in (100, 10_000):
        flags = ("--ttl-rule", "price", "--num-gpu-blocks-override", str(num_blocks), "--max-ttl-s", "1e6")
        with running_server(model, *flags) as server, httpx.Client(base_url=server.url, timeout=60) as http:
            for number in range(8):  # The cost of computing is learned from several prompts.
                http.post("/v1/completions", json={"prompt": f"{number} files " * 40, "max_tokens": 1})
            first: Body = {
                "messages": [{"role": "user", "content": "list the files, please, all of them"}],
                "replay_token_ids": token_ids(http, CALL_TEXT + "<|im_end|>"),
            }
            one, _ = two_turns(http, first, {"job_id": "priced"})
            receipt = one["usage"]["receipt"]
            assert receipt["reason"] == "nothing learned of this tool yet: until holding has cost its worth"
            holds_s.append(receipt["ttl_s"])
    assert 10 < holds_s[1] / holds_s[0] < 1000
