"""Several API server processes are one server: any of them answers, and any may die."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import httpx
import pytest

from continuum.cli.main import main
from continuum.routing.catalog import router_factory
from engine.api.processes.joined_cores import JoinedCores
from engine.api.processes.server_group import ServerGroup
from engine.core_process.client_protocols import Delivery
from engine.core_process.core_client import AsyncMPClient
from engine.core_process.launcher import ClientHandle, JoinedCore
from engine.errors import EngineDeadError
from engine.records.messages import EngineCoreOutputs, EngineReady
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import only_complaint
from tests.api.test_chat import token_ids
from tests.processes.crowd import (
    WITHIN_S,
    Crowd,
    metric,
    running_crowd,
    until_gone,
    until_metric,
)
from tests.processes.support import core_request

ENDLESS = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
FLAGS = ("--num-gpu-blocks-override", "8200", "--max-model-len", "32768")
GREEDY = {"prompt": "one two three", "max_tokens": 6, "temperature": 0}
SENTENCE = "the quick brown fox jumps over the lazy dog " * 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context so long that a request outlives the test's actions."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=32768)


@pytest.fixture(scope="module")
def crowd(long_model: Path) -> Iterator[Crowd]:
    """A crowd that ends with kill -9 of the parent, which must leave nothing behind."""
    with running_crowd(long_model, *FLAGS, "--max-num-queued-reqs", "4") as running:
        yield running
        pids, folder = running.all_pids(), running.folder()
        assert len(pids) == 4
        running.server.process.kill()
        until_gone(pids[:2], 4)
        until_gone(pids, WITHIN_S)
        assert not folder.exists()


def endless_stream(stack: ExitStack, client: httpx.Client) -> Iterator[str]:
    """Lines of a stream that has begun; closing ``stack`` ends it."""
    response = stack.enter_context(client.stream("POST", "/v1/completions", json=ENDLESS))
    assert response.status_code == 200
    lines = response.iter_lines()
    assert next(lines).startswith("data: ")
    return lines


def rest_of(lines: Iterator[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line]


def test_all_processes_serve_the_same(crowd: Crowd) -> None:
    """Connections reach both processes, and both give the same answer."""
    with crowd.client_of_each() as clients:
        assert sorted(clients) == sorted(crowd.front_end_pids())
        answers = [client.post("/v1/completions", json=GREEDY).json() for client in clients.values()]
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1] != ""
    assert answers[0]["id"] != answers[1]["id"]


def test_one_scrape_tells_of_all(crowd: Crowd) -> None:
    """Counts add up over processes, the core's metrics are not summed, and both return the same."""
    with crowd.client_of_each() as clients:
        one, two = clients.values()
        before = {
            name: metric(one, name) for name in ("vllm:request_success_total", "vllm:prompt_tokens_total")
        }
        for client, times in ((one, 2), (two, 3)):
            for _ in range(times):
                prompt_tokens = client.post("/v1/completions", json=GREEDY).json()["usage"]["prompt_tokens"]
        for client in (one, two):
            until_metric(client, "vllm:request_success_total", before["vllm:request_success_total"] + 5)
            total = before["vllm:prompt_tokens_total"] + 5 * prompt_tokens
            assert metric(client, "vllm:prompt_tokens_total") == total
            assert metric(client, "vllm:cache_config_info") == 1
        with ExitStack() as stack:
            streams = [endless_stream(stack, client) for client in (one, two)]
            with httpx.Client(base_url=crowd.url) as third:
                until_metric(third, "vllm:num_requests_running", 2)
                assert third.get("/load").json()["server_load"] == len(streams)


def test_a_jobs_pin_is_found_from_the_other_process(crowd: Crowd) -> None:
    """Turn one goes through one process, turn two through the other: it takes over the pin."""
    job = {"job_id": "travelling", "temperature": 0}
    reply = "THOUGHT: look\n\n```bash\nls -l\n```"
    messages = [{"role": "user", "content": SENTENCE}]
    with crowd.client_of_each() as clients:
        one, two = clients.values()
        said = {"messages": messages, "replay_token_ids": token_ids(one, reply)}
        first = one.post("/v1/chat/completions", json={**job, **said}).json()
        held = first["usage"]["receipt"]["pinned_tokens"]
        assert held >= 16
        messages += [first["choices"][0]["message"], {"role": "user", "content": "and now?"}]
        body = {**job, "messages": messages, "is_last_step": True, "max_tokens": 4}
        second = two.post("/v1/chat/completions", json=body).json()
    receipt = second["usage"]["receipt"]
    assert (receipt["turn"], receipt["previous_pin"]) == (2, "handed_over")
    assert (
        second["usage"]["prompt_tokens_details"]["cached_tokens"]
        >= first["usage"]["prompt_tokens"] // 16 * 16
    )


def test_limits_count_over_all_processes(crowd: Crowd) -> None:
    """At most four requests are open: with two at each process both refuse a fifth, until one has ended."""
    with crowd.client_of_each() as clients, ExitStack() as stack:
        others = [httpx.Client(base_url=crowd.url, timeout=30) for _ in range(2)]
        streams = [endless_stream(stack, client) for client in (*clients.values(), *others)]
        with crowd.client_of_each() as fresh:
            for client in fresh.values():
                refused = client.post("/v1/completions", json=GREEDY)
                assert refused.status_code == 503
                assert "Retry-After" in refused.headers
            others[0].close()
            deadline = time.monotonic() + WITHIN_S
            while any(
                client.post("/v1/completions", json=GREEDY).status_code != 200 for client in fresh.values()
            ):
                assert time.monotonic() < deadline
        others[1].close()
        assert len(streams) == 4


def test_a_killed_front_end_takes_only_its_own_along(crowd: Crowd) -> None:
    """After kill -9 of one process its requests end in the core, the other's go on, and it is replaced."""
    with crowd.client_of_each() as clients, ExitStack() as stack:
        (victim, one), (survivor, two) = clients.items()
        broken, living = endless_stream(stack, one), endless_stream(stack, two)
        with crowd.client_of(survivor) as observer:
            until_metric(observer, "vllm:num_requests_running", 2)
            counted = metric(observer, "vllm:generation_tokens_total")
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError):
                rest_of(broken)
            until_metric(observer, "vllm:num_requests_running", 1)
            assert observer.get("/load").json()["server_load"] == 1
            assert next(line for line in living if line)
        with crowd.client_of_each() as after:
            assert survivor in after
            assert victim not in after
            for client in after.values():
                assert client.post("/v1/completions", json=GREEDY).status_code == 200
                assert metric(client, "vllm:generation_tokens_total") >= counted


def test_a_polite_end_of_all(long_model: Path) -> None:
    """On Ctrl-C, which a terminal sends to every process, streams of both get their grace, then an error."""
    with running_crowd(long_model, *FLAGS, "--shutdown-grace-s", "0.5") as crowd:
        pids, folder = crowd.all_pids(), crowd.folder()
        with crowd.client_of_each() as clients, ExitStack() as stack:
            streams = [endless_stream(stack, client) for client in clients.values()]
            for pid in pids:
                os.kill(pid, signal.SIGINT)
            started = time.monotonic()
            for lines in streams:
                *events, error, done = rest_of(lines)
                assert len(events) > 3  # it went on for a while
                assert "shutting down" in json.loads(error)["error"]["message"]
                assert done == "[DONE]"
            assert 0.4 < time.monotonic() - started < 10
        assert crowd.server.wait(15) == 0
        until_gone(pids, 1)
        assert not folder.exists()


def test_the_death_of_the_core_reaches_all(long_model: Path) -> None:
    """On kill -9 of the core, streams of both end with an error within 2 s, then 503, and exit code 1."""
    with running_crowd(long_model, *FLAGS) as crowd:
        pids = crowd.all_pids()
        with crowd.client_of_each() as clients, ExitStack() as stack:
            streams = [endless_stream(stack, client) for client in clients.values()]
            with crowd.client_of_each() as probes:
                os.kill(crowd.core_pid(), signal.SIGKILL)
                killed_at = time.monotonic()
                for lines in streams:
                    *_, error, done = rest_of(lines)
                    assert json.loads(error)["error"]["code"] == 503
                    assert done == "[DONE]"
                assert time.monotonic() - killed_at < 2
                assert [probe.get("/health").status_code for probe in probes.values()] == [503, 503]
        assert crowd.server.wait(15) == 1
        until_gone(pids, 1)


def test_why_it_cannot_start_is_one_sentence(
    capsys: pytest.CaptureFixture[str], long_model: Path, tmp_path: Path
) -> None:
    """Whether the core or an API server finds the error, the parent reports it and exits."""
    several = ("--port", "0", "--api-server-count", "2")
    assert main(["serve", str(tmp_path), *several]) == 1
    assert str(tmp_path) in only_complaint(capsys.readouterr().err)
    folder = shutil.copytree(long_model, tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    assert main(["serve", str(folder), *several, *FLAGS]) == 1
    assert "tokenizer" in only_complaint(capsys.readouterr().err)


def test_a_client_closes_after_the_end_of_its_core_was_told(tmp_path: Path) -> None:
    """``close`` waits for the thread that reports the core's end and would use a closed socket."""
    told = threading.Event()

    class LateNews(JoinedCore):
        def start(self, on_exit: Callable[[], None]) -> None:
            def late() -> None:
                told.wait()
                on_exit()

            super().start(late)

    client = AsyncMPClient(LateNews(ClientHandle(str(tmp_path), os.getpid(), cast(EngineReady, None), 1)))
    closing = threading.Thread(target=client.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    told.set()
    closing.join(10)
    assert not closing.is_alive()


@pytest.mark.timeout(30)
async def test_a_client_that_closes_as_its_core_ends_waits_for_nobody(tmp_path: Path) -> None:
    """``close`` does not wait for news of the core's end that arrives while its socket is being closed."""
    for _ in range(3000):
        client = AsyncMPClient(
            JoinedCore(ClientHandle(str(tmp_path), os.getpid(), cast(EngineReady, None), 1))
        )
        client.attach(asyncio.get_running_loop(), lambda _: None)
        client.close()


async def test_a_core_that_ended_as_it_was_joined_is_one_that_is_to_come(tmp_path: Path) -> None:
    """A core that ended while it was joined counts as down: its folder is gone. The group serves with its
    other cores, even with none, and later news are still read."""
    ready, gone = EngineReady(9, 100, 16, 10, "bfloat16"), tmp_path / "gone"
    ended = ClientHandle(str(gone), os.getpid(), ready, 1)
    with pytest.raises(EngineDeadError):
        AsyncMPClient(JoinedCore(ended)).await_ready()
    cores = JoinedCores((ended, None), ready)
    group = cores.client(router_factory("jobs"), ServerGroup())
    assert group.await_ready() == ready
    assert [engine.state for engine in await group.engine_states()] == ["down", "down"]
    cores.joined(0, ended)


async def test_a_request_of_a_dead_core_ends_where_the_others_die_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead core's request moves to another core, which has just ended: the request fails."""

    def ended_just_now(*_: object) -> None:
        raise EngineDeadError

    ready = EngineReady(9, 100, 16, 10, "bfloat16")
    handles = tuple(ClientHandle(str(tmp_path), os.getpid(), ready, index) for index in (1, 2))
    cores = JoinedCores(handles, ready)
    group = cores.client(router_factory("least-loaded"), ServerGroup())
    group.await_ready()
    told: asyncio.Queue[Delivery] = asyncio.Queue()
    group.attach(asyncio.get_running_loop(), told.put_nowait)
    group.add_requests([core_request("asked")])
    monkeypatch.setattr(AsyncMPClient, "add_request", ended_just_now)
    cores.died(0)  # ties go to the first
    failed = await asyncio.wait_for(told.get(), 30)
    assert isinstance(failed, EngineCoreOutputs)
    assert [output.request_id for output in failed.outputs] == ["asked"]
    group.close()
