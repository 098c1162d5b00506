"""A drained core: its jobs' turns still come until it is quiet; then the KV of what is paused moves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, running_server
from tests.api.test_jobs_endpoints import Body, ask, call, receipt
from tests.processes.support import until
from tests.processes.test_core_groups import SUCCESS, by_engine, engines, growth

WORDS = "a job of many words " * 12

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "m", max_position_embeddings=2048)


@pytest.fixture(scope="module", params=[1, 2], ids=["one front end", "two front ends"])
def group(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    shared = tmp_path_factory.mktemp("kv")
    flags = ("--data-parallel-size", "2", "--num-gpu-blocks-override", "600")
    more = ("--kv-handover-path", str(shared), "--api-server-count", str(request.param))
    with running_server(model, *flags, *more) as server:
        yield server


@pytest.fixture
def http(group: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=group.url, timeout=60) as client:
        until(lambda: [engine["state"] for engine in engines(client)] == ["up", "up"])
        yield client


def drain(http: httpx.Client, engine: int, **fields: Any) -> Body:
    answer = http.post("/drain", params={"engine": engine, **fields})
    assert answer.status_code == 200, answer.text
    told: Body = answer.json()
    return told


def paused_jobs(http: httpx.Client, kind: str, number: int = 6) -> dict[str, tuple[list[Body], Body]]:
    """Jobs whose tools run, by name: each one's conversation and first answer. Each core has half of them."""
    jobs: dict[str, tuple[list[Body], Body]] = {}
    for index in range(number):
        name, other = f"{kind}-{index}", index % 2
        drain(http, other)
        jobs[name] = call(http, f"{name} {WORDS}", job_id=name)
        drain(http, other, off="true")
    return jobs


def go_on(http: httpx.Client, name: str, paused: tuple[list[Body], Body]) -> Body:
    """The job's second turn; returns its receipt, after which nothing is awaited of the job."""
    messages, _ = paused
    told = receipt(ask(http, messages, job_id=name, is_last_step=True))
    assert told["turn"] == 2
    return told


def test_paused_jobs_move_with_their_kv(http: httpx.Client) -> None:
    """Nothing is computed again; all turns go to the other core, which knows the jobs."""
    jobs = paused_jobs(http, "moved")
    told = drain(http, 0, wait="true")
    assert told["state"] == "drained"
    assert told["moved"]["turns"] == len(jobs) // 2
    assert told["moved"]["tokens"] > 0
    assert told["moved"]["left"] == 0
    before = by_engine(http, SUCCESS)
    for name, paused in jobs.items():
        after = go_on(http, name, paused)
        assert after["cached_tokens"] == receipt(paused[1])["pinned_tokens"]
        assert after["recomputed_tokens"] == 0
    assert growth(http, before, len(jobs))[0] == 0
    assert drain(http, 0, off="true")["state"] == "up"


def test_turns_of_known_jobs_still_come_until_it_is_quiet(http: httpx.Client) -> None:
    """New jobs go elsewhere at once; the core is drained before the deadline, when nothing is paused."""
    jobs = paused_jobs(http, "awaited")
    assert drain(http, 1, deadline_s=600)["state"] == "draining"
    before = by_engine(http, SUCCESS)
    for number in range(3):
        ask(http, call(http, f"new {number} {WORDS}", job_id=f"new-{number}")[0], is_last_step=True)
    assert growth(http, before, 6)[1] == 0
    before = by_engine(http, SUCCESS)
    for name, paused in jobs.items():
        assert go_on(http, name, paused)["cached_tokens"] > 0
    assert growth(http, before, len(jobs))[1] > 0
    until(lambda: engines(http)[1]["state"] == "drained")
    assert drain(http, 1, off="true")["state"] == "up"


def test_a_core_that_is_killed_as_it_drains_loses_time_only(group: Server, http: httpx.Client) -> None:
    jobs = paused_jobs(http, "killed")
    victim = engines(http)[0]["process_id"]
    drain(http, 0)
    os.kill(victim, signal.SIGKILL)
    for name, (messages, _) in jobs.items():
        said = ask(http, messages, job_id=name, temperature=0)["choices"]
        assert said == ask(http, messages, job_id=f"{name} undisturbed", temperature=0)["choices"]
    drain(http, 0, off="true")
    until(lambda: [engine["state"] for engine in engines(http)] == ["up", "up"])


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_cores_are_killed_at_random_as_jobs_move(group: Server, http: httpx.Client) -> None:
    """``NUM_KILLS`` says how often; a server gives a core up that has ended ten times in a minute."""
    random = Random(5)
    for number in range(int(os.environ.get("NUM_KILLS", "4"))):
        jobs = paused_jobs(http, f"round-{number}")
        drained = random.randrange(2)
        victim = engines(http)[random.randrange(2)]["process_id"]
        with ThreadPoolExecutor(2) as threads:
            threads.submit(drain, http, drained, wait="true")
            threads.submit(kill_after, victim, random.random() * 0.03)
        turns = {
            name: ask(http, messages, job_id=name, temperature=0) for name, (messages, _) in jobs.items()
        }
        until(lambda: "down" not in {engine["state"] for engine in engines(http)})
        drain(http, drained, off="true")
        until(lambda: [engine["state"] for engine in engines(http)] == ["up", "up"])
        for name, (messages, _) in jobs.items():
            alone = ask(http, messages, job_id=f"{name} alone", temperature=0)
            assert turns[name]["choices"] == alone["choices"], number


def kill_after(pid: int, delay_s: float) -> None:
    threading.Event().wait(delay_s)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"deadline_s": "-1"}, "deadline_s must be a number of seconds from 0 to 86400"),
        ({"deadline_s": "soon"}, "deadline_s must be a number of seconds"),
        ({"wait": "maybe"}, "wait must be true or false"),
    ],
)
def test_what_is_wrong_is_said(http: httpx.Client, fields: dict[str, str], said: str) -> None:
    answer = http.post("/drain", params={"engine": "0", **fields})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert {engine["state"] for engine in engines(http)} == {"up"}
