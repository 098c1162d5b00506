"""Results of a tool that come while it still runs: what is known of the next turn's prompt is computed ahead,
through every API and for every kind of cache. Answers stay those of the request alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from continuum.cli.main import main
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, running_server
from tests.api.test_service import eventually
from tests.worker.conftest import VARIANTS

BLOCK = 16
FLAGS = ("--num-gpu-blocks-override", "900", "--max-model-len", "4096", "--device", "cpu")
PARTS = 10
RESULT = "".join(f"line {number}: value {number * 37 % 101}, state ok\n" for number in range(60))
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
KINDS: dict[str, tuple[str, ...]] = {
    "full": ("llama",),
    "windows": ("gemma3",),
    "latents": ("deepseek-v3",),
    "states": ("qwen3-next",),
    "two cores": ("llama", "--data-parallel-size", "2", "--api-server-count", "2"),
}
"""A model, and flags."""
Body = dict[str, Any]


@pytest.fixture(scope="module", params=list(KINDS.values()), ids=list(KINDS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("early")
    family, *flags = request.param
    folder = make_model_folder(base / "model", **VARIANTS[family] | {"max_position_embeddings": 4096})
    trace = base / "trace.jsonl"
    with running_server(folder, *FLAGS, *flags, "--trace", str(trace)) as running:
        yield running
        assert running.interrupt() == 0
    traces = sorted(base.glob("trace*"))
    assert len(traces) == (2 if flags else 1)
    for trace in traces:
        assert main(["trace", "replay", str(trace)]) == 0
    if not flags:
        check_words(traces[0])


def check_words(trace: Path) -> None:
    """Early results are told as what they are: parts of the gap between two turns."""
    told = StringIO()
    with redirect_stdout(told):
        assert main(["trace", "explain", str(trace), "chat"]) == 0
    said = " ".join(told.getvalue().split())
    assert "Job chat: 2 turns" in said
    assert said.count("with an early result, until the same time") == PARTS


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def post(http: httpx.Client, path: str, body: Body) -> Body:
    answer = http.post(path, json={"model": "tiny", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    told: Body = answer.json()
    return told


def call_of_a_tool(http: httpx.Client) -> Body:
    """Fields by which the model calls one."""
    text = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call><|im_end|>'
    tokens = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    return {"replay_token_ids": tokens}


def parts_of(result: str) -> list[str]:
    return [result[: len(result) * number // PARTS] for number in range(1, PARTS + 1)]


def check(usage: Body, prompt_tokens: int, cached_tokens: int) -> None:
    """The turn finds nearly all of the result computed, and its receipt says by whom."""
    receipt = usage["receipt"]
    assert (receipt["turn"], receipt["previous_pin"]) == (2, "handed_over")
    assert receipt["recomputed_tokens"] == 0
    assert prompt_tokens - cached_tokens < 4 * BLOCK
    assert receipt["superseded_tokens"] < 2 * BLOCK
    assert receipt["prewarmed_tokens"] > 0.8 * (prompt_tokens - 200)


def test_chats(http: httpx.Client) -> None:
    path = "/v1/chat/completions"
    messages: list[Body] = [{"role": "user", "content": "chats: look at the log"}]
    asked: Body = {"tools": [TOOL], "job_id": "chat"}
    first = post(http, path, {**asked, "messages": messages, **call_of_a_tool(http)})
    reply = first["choices"][0]["message"]
    call_id = reply["tool_calls"][0]["id"]
    for part in parts_of(RESULT):
        result = {"role": "tool", "tool_call_id": call_id, "content": part}
        early = {**asked, "messages": [*messages, reply, result], "prompt_cache_options": {"prewarm": True}}
        told = post(http, path, early)
        assert told["choices"][0]["message"]["content"] == ""
        assert told["usage"]["completion_tokens"] == 0
        assert http.get("/v1/jobs/chat").json()["turns"] == 1
    last = {**asked, "messages": [*messages, reply, result], "max_tokens": 8}
    answer = post(http, path, last)
    usage = answer["usage"]
    check(usage, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
    alone = post(http, path, {**last, "job_id": "alone", "cache_salt": "alone"})
    assert alone["choices"][0]["message"] == answer["choices"][0]["message"]


def test_messages(http: httpx.Client) -> None:
    path = "/v1/messages"
    tools = [{"name": "bash", "input_schema": {"type": "object"}}]
    messages: list[Body] = [{"role": "user", "content": "messages: look at the log"}]
    asked: Body = {"tools": tools, "job_id": "messages"}
    first = post(http, path, {**asked, "messages": messages, "max_tokens": 400, **call_of_a_tool(http)})
    messages.append({"role": "assistant", "content": first["content"]})
    call_id = first["content"][-1]["id"]
    for part in parts_of(RESULT):
        result = {"type": "tool_result", "tool_use_id": call_id, "content": part}
        last = {**asked, "messages": [*messages, {"role": "user", "content": [result]}]}
        early = post(http, path, {**last, "max_tokens": 0})
        assert (early["content"], early["usage"]["output_tokens"]) == ([], 0)
    answer = post(http, path, {**last, "max_tokens": 8})
    usage = answer["usage"]
    cached = usage["cache_read_input_tokens"]
    check(usage, usage["input_tokens"] + cached + usage["cache_creation_input_tokens"], cached)
    alone = post(http, path, {**last, "max_tokens": 8, "job_id": "alone", "cache_salt": "alone"})
    assert alone["content"] == answer["content"]


def test_responses(http: httpx.Client) -> None:
    """The parts follow a stored response, and so does the whole."""
    path = "/v1/responses"
    tools = [{"type": "function", "name": "bash", "parameters": {"type": "object"}}]
    asked: Body = {"tools": tools, "max_output_tokens": 64}
    first = post(http, path, {**asked, "input": "responses: look at the log", **call_of_a_tool(http)})
    (call,) = (item for item in first["output"] if item["type"] == "function_call")
    asked["previous_response_id"] = first["id"]
    for part in parts_of(RESULT):
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": part}
        early = post(http, path, {**asked, "input": [result], "prompt_cache_options": {"prewarm": True}})
        assert (early["output"], early["usage"]["output_tokens"]) == ([], 0)
    answer = post(http, path, {**asked, "input": [result]})
    usage = answer["usage"]
    check(usage, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])


def test_the_turn_ends_what_was_to_run_ahead_of_it(http: httpx.Client) -> None:
    """Nothing runs. The early result waits until its turn comes, and is answered then; only the turn is
    computed."""
    prompt = [7] * 200
    asked: Body = {"job_id": "ended", "max_tokens": 4, "return_token_ids": True}
    first = post(http, "/v1/completions", {**asked, "prompt": prompt})
    prompt += first["choices"][0]["token_ids"] + [9] * 300
    http.post("/pause?mode=keep").raise_for_status()
    with ThreadPoolExecutor(2) as pool:
        early = {**asked, "prompt": prompt, "prompt_cache_options": {"prewarm": True}}
        ahead = pool.submit(post, http, "/v1/completions", early)
        eventually(lambda: http.get("/is_paused").json()["num_waiting"] == 1)
        turn = pool.submit(post, http, "/v1/completions", {**asked, "prompt": [*prompt, 5]})
        assert ahead.result(60)["usage"]["completion_tokens"] == 0
        assert http.get("/is_paused").json()["num_waiting"] == 1
        http.post("/resume").raise_for_status()
        receipt = turn.result(60)["usage"]["receipt"]
    assert (receipt["turn"], receipt.get("prewarmed_tokens", 0)) == (2, 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_nothing_is_generated_several_times(http: httpx.Client, path: str) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "n": 2}
    answer = http.post(path, json={**body, "prompt_cache_options": {"prewarm": True}})
    assert answer.status_code == 400
    assert json.loads(answer.text)["error"]["param"] == "n"
