"""Several engine cores are one server: jobs stay on their cores, and a dying core ends its requests only."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, is_alive, running_server
from tests.child_processes import children_of
from tests.processes.support import until

ENDLESS = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
FLAGS = ("--num-gpu-blocks-override", "8200", "--max-model-len", "32768", "--data-parallel-size", "2")
SENTENCE = "the quick brown fox jumps over the lazy dog "

Body = dict[str, Any]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context so long that a request outlives the test's actions."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=32768)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="one front end", marks=pytest.mark.long),
        pytest.param(2, id="two front ends"),
    ],
)
def group(
    request: pytest.FixtureRequest, long_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of two cores; at the end no process is left."""
    log = tmp_path_factory.mktemp("log") / "stderr"
    with running_server(long_model, *FLAGS, "--api-server-count", str(request.param), log=log) as server:
        yield server
        cores = server.core_pids()
        assert server.interrupt() == 0
        assert not any(map(is_alive, cores))


@pytest.fixture
def http(group: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=group.url, timeout=60) as client:
        yield client


def engines(http: httpx.Client) -> list[Body]:
    data: list[Body] = http.get("/engines").json()["data"]
    return data


def all_up(http: httpx.Client) -> bool:
    return [engine["state"] for engine in engines(http)] == ["up", "up"]


def by_engine(http: httpx.Client, name: str) -> list[float]:
    """The values of a metric, in the order of cores."""
    values = [0.0, 0.0]
    for line in http.get("/metrics").text.splitlines():
        if line.startswith(name + "{"):
            values[int(line.partition('engine="')[2].partition('"')[0])] += float(line.split()[-1])
    return values


SUCCESS = "vllm:request_success_total"


def growth(http: httpx.Client, before: list[float], total: int) -> list[float]:
    """Waits for ``total`` more answers; returns the growth for each core."""
    until(lambda: sum(by_engine(http, SUCCESS)) >= sum(before) + total)
    return [now - then for now, then in zip(by_engine(http, SUCCESS), before, strict=True)]


def turn(http: httpx.Client, text: str, said: list[Body], **fields: Any) -> Body:
    """Adds one turn to a conversation; returns the answer's usage."""
    said.append({"role": "user", "content": text})
    body = {"messages": said, "max_tokens": 4, "temperature": 0, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    said.append(answer.json()["choices"][0]["message"])
    usage: Body = answer.json()["usage"]
    return usage


@pytest.mark.parametrize("named", [True, False])
def test_jobs_come_back_to_their_core(group: Server, http: httpx.Client, named: bool) -> None:
    """A job's turns go to its core, through any API server and whether or not the client names the job."""
    chats: list[list[Body]] = [[] for _ in range(8)]
    before, kind = by_engine(http, SUCCESS), "named" if named else "unnamed"
    for number in range(3):
        for index, said in enumerate(chats):
            fields = {"job_id": f"named-{index}"} if named else {}
            with httpx.Client(base_url=group.url, timeout=60) as once:  # a connection for each turn
                usage = turn(once, f"{kind} {index} {number}: {SENTENCE * 4}", said, **fields)
            if number:
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached >= usage["prompt_tokens"] // 3, (index, number)
    growth(http, before, 24)
    # A core with fewer tokens of named jobs may get all unnamed jobs.
    assert min(by_engine(http, SUCCESS)) >= 3, "both cores have jobs"
    if named:
        jobs = {job["id"] for job in http.get("/v1/jobs").json()["data"]}
        assert {f"named-{index}" for index in range(8)} <= jobs
        assert http.get("/v1/jobs/named-3").json()["turns"] == 3
        capacity = http.get("/v1/capacity").json()
        assert capacity["usable_blocks"] == 2 * 8199, "of both cores, without null blocks"
        assert capacity["jobs_that_fit"] > 0


def test_signals_reach_the_core_of_the_job(http: httpx.Client) -> None:
    """Signals about tools go to the core that holds the job; finishing the job removes it there."""
    for number in range(4):
        said: list[Body] = []
        turn(http, f"signal {number} {SENTENCE * 4}", said, job_id=f"signal-{number}")
        told = {"state": "started", "expected_s": 30.0}
        answer = http.post(f"/v1/jobs/signal-{number}/signals", json=told)
        assert answer.status_code == 200, answer.text
        assert http.get(f"/v1/jobs/signal-{number}").json()["branches"][0]["told"] == "started"
        assert http.post(f"/v1/jobs/signal-{number}/finish").status_code < 300
        assert http.get(f"/v1/jobs/signal-{number}").status_code == 404


def test_answers_of_one_prompt_come_from_one_core(http: httpx.Client) -> None:
    """Four answers share their prompt's blocks, so they run on one core."""
    before = by_engine(http, SUCCESS)
    body = {"prompt": SENTENCE * 6, "n": 4, "max_tokens": 3}
    assert len(http.post("/v1/completions", json=body).json()["choices"]) == 4
    assert sorted(growth(http, before, 4)) == [0, 4]


def test_a_drained_core_takes_nothing_new(http: httpx.Client) -> None:
    """A drained core's jobs continue on the other one; it takes requests again when draining is off."""
    for path in (
        "/drain?engine=",
        "/drain?engin=0",
        "/drain?engine=2",
        "/drain?engine=-1",
        "/drain?engine=0&off=maybe",
    ):
        assert http.post(path).status_code == 400, path
    said: list[Body] = []
    turn(http, f"drained {SENTENCE * 4}", said, job_id="drained")
    for engine in (0, 1):
        assert http.post(f"/drain?engine={engine}").json()["state"] == "draining"
        before = by_engine(http, SUCCESS)
        for number in range(3):
            turn(http, f"{number}", said, job_id="drained")
        assert growth(http, before, 3)[engine] == 0
        assert http.post(f"/drain?engine={engine}&off=true").json()["state"] == "up"


def streams_on_both(http: httpx.Client, stack: ExitStack) -> dict[int, Iterator[str]]:
    """An endless stream on each core, by core number."""
    found: dict[int, Iterator[str]] = {}
    for engine in (0, 1):
        http.post(f"/drain?engine={1 - engine}")
        response = stack.enter_context(http.stream("POST", "/v1/completions", json=ENDLESS))
        found[engine] = response.iter_lines()
        assert next(found[engine]).startswith("data: ")
        http.post(f"/drain?engine={1 - engine}&off=true")
    return found


def test_a_core_that_dies_ends_its_requests_only(group: Server, http: httpx.Client) -> None:
    """The dead core's stream ends with an error at once, the other goes on; then both take jobs again."""
    until(lambda: all_up(http))
    with ExitStack() as stack:
        streams = streams_on_both(http, stack)
        victim = engines(http)[1]["process_id"]
        os.kill(victim, signal.SIGKILL)
        died_s = time.monotonic()
        told = [line for line in streams[1] if line]
        assert time.monotonic() - died_s < 10  # at once; on a busy machine a process may wait for a CPU
        error = next(line for line in told if '"error"' in line)
        assert "has died" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert next(line for line in streams[0] if line).startswith("data: ")
        said: list[Body] = []
        for number in range(4):  # the remaining core answers requests meanwhile
            turn(http, f"{number} {SENTENCE}", said, job_id="meanwhile")
        assert http.get("/health").status_code == 200
        until(lambda: all_up(http))
        assert victim not in group.core_pids()
        assert next(line for line in streams[0] if line).startswith("data: ")
    before = by_engine(http, SUCCESS)
    for number in range(12):
        turn(http, f"after {number} {SENTENCE * 8}", [], job_id=f"after-{number}")
    assert growth(http, before, 12)[1] > 0


def test_requests_without_an_answer_yet_go_to_another_core(group: Server, http: httpx.Client) -> None:
    """A frozen core has answered nothing; when it dies, no client notices."""
    until(lambda: all_up(http))
    http.post("/drain?engine=0")
    victim = engines(http)[1]["process_id"]
    os.kill(victim, signal.SIGSTOP)
    with httpx.Client(base_url=group.url, timeout=60) as other, ThreadPoolExecutor(1) as thread:
        body = {"prompt": "moved", "max_tokens": 3}
        answer = thread.submit(other.post, "/v1/completions", json=body)
        until(lambda: engines(http)[1]["num_open"] == 1)
        os.kill(victim, signal.SIGKILL)
        assert answer.result().status_code == 200, answer.result().text
    http.post("/drain?engine=0&off=true")
    until(lambda: all_up(http))


def test_processes_die_at_random_and_nothing_hangs(group: Server) -> None:
    """A core or an API server is killed under load. Every request ends, and the server recovers."""
    chance = random.Random(4)
    for number in range(4):
        until(lambda: is_well(group.url))
        front_ends = children_of(group.process.pid, "from engine.api.processes.api_server import")
        victim = chance.choice([*group.core_pids(), *front_ends])
        with ExitStack() as stack:
            streams = []
            for stream in range(6):
                client = stack.enter_context(httpx.Client(base_url=group.url, timeout=30))
                body = {**ENDLESS, "prompt": f"round {number}, {stream}", "max_tokens": 200}
                response = stack.enter_context(client.stream("POST", "/v1/completions", json=body))
                streams.append(response.iter_lines())
            with suppress(ProcessLookupError):  # it may have been about to end since the previous kill
                os.kill(victim, signal.SIGKILL)
            for lines in streams:
                with suppress(httpx.TransportError):  # its API server was killed
                    assert [line for line in lines if line]
    until(lambda: is_well(group.url))


def test_an_api_server_that_starts_while_no_core_is_up_serves_when_one_is(group: Server) -> None:
    """Both cores and one API server are killed at once; once all have restarted, the server answers."""
    until(lambda: is_well(group.url))
    front_ends = children_of(group.process.pid, "from engine.api.processes.api_server import")
    killed = [*group.core_pids(), *front_ends[:1]]
    for process in killed:
        os.kill(process, signal.SIGKILL)
    until(lambda: len(now := group.core_pids()) == 2 and not {*now} & {*killed})
    until(lambda: is_well(group.url))
    said: list[Body] = []
    with httpx.Client(base_url=group.url, timeout=60) as http:
        assert turn(http, "and now", said)["completion_tokens"] > 0


def is_well(url: str) -> bool:
    """Whether both cores are up and idle."""
    try:
        with httpx.Client(base_url=url, timeout=30) as http:
            states = engines(http)
            return all_up(http) and not sum(state["num_open"] + state["num_running"] for state in states)
    except httpx.TransportError:
        return False


def test_each_core_writes_a_trace_that_replays(long_model: Path, tmp_path: Path) -> None:
    """The second core's trace has the core's number in its name."""
    trace = tmp_path / "trace.jsonl"
    with running_server(long_model, *FLAGS, "--trace", str(trace)) as server:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for number in range(6):
                said: list[Body] = []
                turn(http, f"traced {number} {SENTENCE * 4}", said, job_id=f"traced-{number}")
                turn(http, "and again", said, job_id=f"traced-{number}")
        assert server.interrupt() == 0
    for path in (trace, tmp_path / "trace.engine1.jsonl"):
        told = continuum("trace", "replay", str(path))
        assert told.returncode == 0, told.stdout + told.stderr


def continuum(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "continuum.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("front_ends", ["1", "2"])
def test_a_core_that_cannot_start_ends_the_server(long_model: Path, front_ends: str) -> None:
    """One sentence gives the reason, and all cores are stopped, also those that were just launched."""
    flags = ("--port", "0", "--data-parallel-size", "2", "--api-server-count", front_ends)
    told = continuum("serve", str(long_model), *flags, "--kv-cache-memory-bytes", "1")
    assert told.returncode == 1
    assert told.stderr.strip().splitlines()[-1].startswith("continuum: ")


@pytest.mark.parametrize("size", ["0", "-1", "1025", "many"])
def test_a_wrong_number_of_cores_is_refused(long_model: Path, size: str) -> None:
    """A wrong --data-parallel-size is refused by the flag's name, before anything starts."""
    told = continuum("serve", str(long_model), "--data-parallel-size", size)
    assert told.returncode == 2
    assert "--data-parallel-size" in told.stderr
