"""Promises of the endpoints other than generation: health, models, tokens, metrics, caches, connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

HELLO = [{"role": "user", "content": "hello"}]


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Polls the server without sleeping, since each poll is a round trip."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
    return False


def test_it_says_that_it_lives(http: httpx.Client) -> None:
    """Health probes of every kind get a 200."""
    assert http.get("/health").status_code == 200
    assert http.get("/ping").status_code == 200
    assert http.post("/ping").status_code == 200
    assert http.get("/version").json()["version"]


def test_models(http: httpx.Client) -> None:
    """The model is listed under its public name, with its context length."""
    [card] = http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 1024)
    assert http.get("/v1/models/tiny").json()["id"] == "tiny"
    assert http.get("/v1/models/other").status_code == 404


def test_a_first_token_does_not_wait_for_an_acknowledgement(http: httpx.Client) -> None:
    """Headers and first token are two small packets: with Nagle's algorithm the second one would wait 40 ms
    on a connection that is a few requests old."""
    waits_s = []
    for _ in range(20):
        with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            headers_at = time.monotonic()
            lines = response.iter_lines()
            next(lines)
            waits_s.append(time.monotonic() - headers_at)
            assert list(lines)[-2] == "data: [DONE]"
    assert min(waits_s[10:]) < 0.03


@pytest.mark.parametrize("text", ["hello world", "naïve 日本語 🙂\n\ttabs", ""])
def test_tokens_and_back(http: httpx.Client, text: str) -> None:
    """Tokenized text can be detokenized."""
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"] == text


def test_the_request_id_is_sent_back(http: httpx.Client) -> None:
    """The response has the client's request id, or a new one, to join both logs."""
    own = http.get("/health", headers={"X-Request-Id": "abc-1"})
    assert own.headers["x-request-id"] == "abc-1"
    ids = {http.get("/health").headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    answer = http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "abc-2"}
    )
    assert answer.json()["id"] == "cmpl-abc-2"


def test_metrics(http: httpx.Client) -> None:
    """V1's series exist under V1's names, next to ours."""
    http.post("/v1/completions", json={"prompt": "count me", "max_tokens": 2})
    page = http.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_queue_time_seconds_bucket",
        "vllm:request_prefill_time_seconds_bucket",
        "vllm:request_decode_time_seconds_bucket",
        "continuum:pins",
        "continuum:pinned_blocks",
        "continuum:recomputed_tokens_total",
        "continuum:gap_seconds_bucket",
    ):
        assert f'\n{name}{{engine="0"' in page, name
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}' in page
    assert 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="400"} 1.0' in page


def metric(http: httpx.Client, name: str, behind: str = "{") -> float:
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + behind))


def test_aborted_requests_are_counted(http: httpx.Client) -> None:
    """Disconnects count one abort per unfinished answer, and do not enter latencies."""
    name = 'vllm:request_success_total{engine="0",finished_reason="abort"'
    latency = "vllm:e2e_request_latency_seconds_count"
    aborted, ended = metric(http, name, ","), metric(http, latency)
    body = {"prompt": "count me", "max_tokens": 900, "ignore_eos": True, "n": 3, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
    deadline = time.monotonic() + 30
    while metric(http, name, ",") < aborted + 3:
        assert time.monotonic() < deadline
    assert metric(http, latency) == ended


def test_n_is_observed_once_per_request(http: httpx.Client) -> None:
    """``n`` is observed once per request, with the client's value."""
    count, total = (f"vllm:request_params_n_{what}" for what in ("count", "sum"))
    before = metric(http, count), metric(http, total)
    for n in (1, 3):
        http.post("/v1/completions", json={"prompt": "count me", "max_tokens": 2, "n": n})
    assert (metric(http, count), metric(http, total)) == (before[0] + 2, before[1] + 4)


def test_counters_count(http: httpx.Client) -> None:
    """Every generated token is counted."""
    before = metric(http, "vllm:generation_tokens_total")
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 7, "ignore_eos": True})
    assert eventually(lambda: metric(http, "vllm:generation_tokens_total") == before + 7)


def test_the_prefix_cache_can_be_emptied(http: httpx.Client) -> None:
    """After a reset the same prompt is recomputed."""
    body = {"prompt": "reset me " * 40, "max_tokens": 1}

    def cached() -> int:
        usage = http.post("/v1/completions", json=body).json()["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    cached()
    assert cached() > 0
    assert eventually(lambda: http.post("/reset_prefix_cache").json() == {"success": True})
    assert cached() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(http: httpx.Client, stream: bool) -> None:
    """On a disconnect, in a stream or before a whole answer, the engine stops the request."""
    body = (
        b'{"prompt": "a", "max_tokens": 1000, "ignore_eos": true, "stream": %s}'
        % str(stream).lower().encode()
    )
    before = metric(http, "vllm:generation_tokens_total")
    with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        assert eventually(lambda: metric(http, "vllm:generation_tokens_total") > before)
    assert eventually(lambda: http.get("/load").json()["server_load"] == 0)
    assert eventually(lambda: http.post("/reset_prefix_cache").json() == {"success": True})
    assert metric(http, "vllm:generation_tokens_total") < before + 1000


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "num_running"), [("wait", 0), ("keep", 1)])
def test_a_pause(http: httpx.Client, mode: str, num_running: int) -> None:
    """During a pause nothing new starts; running requests finish or freeze; after resuming all are
    answered."""
    body = {"prompt": f"{mode} " * 9, "max_tokens": 900, "ignore_eos": True}
    before = metric(http, "vllm:generation_tokens_total")
    with ThreadPoolExecutor() as clients:
        running = clients.submit(http.post, "/v1/completions", json=body)
        assert eventually(lambda: metric(http, "vllm:generation_tokens_total") > before)
        assert http.post("/pause", params={"mode": mode}).json() == {"status": "paused"}
        waiting = clients.submit(http.post, "/v1/completions", json={**body, "max_tokens": 3})
        reason = "paused" if mode == "wait" else "paused with all that runs"
        told = {"is_paused": True, "reasons": [reason], "num_running": num_running, "num_waiting": 1}
        assert eventually(lambda: http.get("/is_paused").json() == told)
        if mode == "wait":
            running.result()
        assert (running.done(), waiting.done()) == (mode == "wait", False)
        assert http.post("/resume").json() == {"status": "resumed"}
        assert running.result().json()["usage"]["completion_tokens"] == 900
        assert waiting.result().json()["usage"]["completion_tokens"] == 3
    told = {"is_paused": False, "reasons": [], "num_running": 0, "num_waiting": 0}
    assert http.get("/is_paused").json() == told


def test_a_mode_of_pause_that_there_is_not(http: httpx.Client) -> None:
    """An unknown mode is refused and the server goes on."""
    answer = http.post("/pause", params={"mode": "abort"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mode")
    assert http.get("/is_paused").json()["is_paused"] is False


def test_an_idle_connection_is_kept(http: httpx.Client) -> None:
    """An idle connection outlives a tool call, which is longer than web servers usually wait."""
    assert http.get("/health").headers.get("connection", "keep-alive") == "keep-alive"
