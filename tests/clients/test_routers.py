"""Other projects' routers, unmodified, before two of our servers: agents' jobs go on as they do alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.server import Server, running_server
from tests.api.test_kv_transfer import FLAGS
from tests.processes.event_subscriber import free_ports

BLOCK = 16
WAIT_S = 120.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def two_servers(model: Path) -> Iterator[tuple[list[Server], list[str]]]:
    """Two servers, and where each publishes its KV events."""
    ports = free_ports(2)
    events = [{"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"} for port in ports]
    flags = [(*FLAGS, "--kv-events-config", json.dumps(config)) for config in events]
    with running_server(model, *flags[0]) as one, running_server(model, *flags[1]) as two:
        yield [one, two], [f"tcp://127.0.0.1:{port}" for port in ports]


@contextmanager
def router(package: str, servers: list[Server], *flags: str) -> Iterator[str]:
    """Starts a router before the servers; yields its address when it is ready."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    port, metrics = free_ports(2)
    command = [sys.executable, "-m", f"{package}.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics), "--worker-urls", *(server.url for server in servers)]
    output = subprocess.DEVNULL
    process = subprocess.Popen([*command, *flags], stdout=output, stderr=output, env=dict(os.environ))
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url)
        yield url
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + WAIT_S
    while True:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)


def play(url: str, job: str, num_turns: int = 3) -> list[tuple[str, int]]:
    """Plays a job of streamed and whole turns; returns each answer and its cached tokens."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    create: Any = client.chat.completions.create  # its overloads want each message's own type
    messages = [{"role": "user", "content": f"{job}: read the file, and say what is in it. " * 4}]
    answers = []
    for number in range(num_turns):
        asked = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
        headers = {"x-session-id": job}
        if number % 2:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = list(create(**asked, **options, extra_headers=headers))
            text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            usage = chunks[-1].usage
        else:
            whole = create(**asked, extra_headers=headers)
            text, usage = whole.choices[0].message.content, whole.usage
        answers.append((text, usage.prompt_tokens_details.cached_tokens))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And the next?"}]
    return answers


def turns_of(server: Server) -> dict[str, int]:
    jobs = httpx.get(f"{server.url}/v1/jobs").json()["data"]
    return {job["id"]: job["turns"] for job in jobs}


@pytest.mark.parametrize(
    ("package", "policy"),
    [
        ("vllm_router", "consistent_hash"),
        ("vllm_router", "sticky_least_loaded"),
        ("vllm_router", "cache_aware"),
        ("sglang_router", "cache_aware"),
    ],
)
def test_a_jobs_turns_find_their_history(package: str, policy: str, model_folder: Path) -> None:
    """Each job's turns meet on one server, with the answers and cached tokens of a server alone."""
    names = [f"job-{number}" for number in range(4)]
    with running_server(model_folder, *FLAGS) as alone:
        expected = [play(alone.url, name) for name in names]
    assert all(cached >= 4 * BLOCK for turns in expected for _, cached in turns[1:])
    with two_servers(model_folder) as (servers, _), router(package, servers, "--policy", policy) as url:
        assert [play(url, name) for name in names] == expected
        told = [turns_of(server) for server in servers]
    assert sorted(turns for jobs in told for turns in jobs.values()) == [3] * 4
    if package == "vllm_router":  # SGLang's passes no header of a session on: jobs are inferred
        assert sorted(name for jobs in told for name in jobs) == names


def test_kv_events_place_a_prompt(model_folder: Path) -> None:
    """vLLM's router asks us for a prompt's tokens, and finds by our events which server has its KV."""
    with two_servers(model_folder) as (servers, endpoints):
        flags = ["--policy", "kv_aware", "--kv-event-model", "tiny"]
        for server, endpoint in zip(servers, endpoints, strict=True):
            flags += ["--kv-event-source", f"{server.url}={endpoint}"]
        with router("vllm_router", servers, *flags) as url:
            end = time.monotonic() + WAIT_S
            num_right = 0
            number = 0
            while num_right < 6:  # its index is a moment behind our events
                job = f"prompt-{number}"
                play(servers[number % 2].url, job, 1)
                ((_, num_cached),) = play(url, job, 1)
                num_right = num_right + 1 if num_cached >= 4 * BLOCK else 0
                number += 1
                assert time.monotonic() < end
