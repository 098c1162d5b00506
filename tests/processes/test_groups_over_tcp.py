"""A group with cores on other nodes: a head with API servers, and a node without, over TCP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, is_alive, running_server
from tests.child_processes import children_of
from tests.processes.event_subscriber import free_ports
from tests.processes.support import WITHIN_S, engine_states, until
from tests.worker.conftest import VARIANTS

ENDLESS = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
LIMITS = ("--num-gpu-blocks-override", "8200", "--max-model-len", "32768")
SENTENCE = "the quick brown fox jumps over the lazy dog "
CORE = "engine.core_process.core_proc"
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


class Node:
    """A running ``continuum serve --headless`` with one core."""

    def __init__(self, model: Path, port: int, log: Path, *flags: str, rank: int = 1) -> None:
        command = [sys.executable, "-m", "continuum.cli", "serve", str(model), "--headless", *LIMITS]
        group = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
        place = ("--data-parallel-start-rank", str(rank), "--data-parallel-rpc-port", str(port))
        self.log = log
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [*command, *group, *place, *flags],
                stderr=stderr,
                stdout=stderr,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )

    def core(self) -> int | None:
        """Process id of the node's core, while there is one."""
        return next(iter(children_of(self.process.pid, CORE)), None)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running_node(model: Path, port: int, log: Path, *flags: str, rank: int = 1) -> Iterator[Node]:
    node = Node(model, port, log, *flags, rank=rank)
    try:
        yield node
    finally:
        node.kill()


def head_flags(port: int, *, num_local: int = 1) -> tuple[str, ...]:
    group = ("--data-parallel-size", "2", "--data-parallel-size-local", str(num_local))
    return (*LIMITS, *group, "--data-parallel-rpc-port", str(port))


def turn(server: Server, said: list[Body], text: str, **fields: Any) -> Body:
    """Adds one turn to a conversation; returns its usage."""
    said.append({"role": "user", "content": text})
    body = {"messages": said, "max_tokens": 4, "temperature": 0, **fields}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    said.append(answer.json()["choices"][0]["message"])
    usage: Body = answer.json()["usage"]
    return usage


def served_by(server: Server) -> list[float]:
    """The number of answers by core."""
    counts = [0.0, 0.0]
    for line in httpx.get(server.url + "/metrics", timeout=60).text.splitlines():
        if line.startswith("vllm:request_success_total{"):
            counts[int(line.partition('engine="')[2].partition('"')[0])] += float(line.split()[-1])
    return counts


@contextmanager
def endless_streams(server: Server, count: int) -> Iterator[None]:
    """Opens endless streams, each of which has begun."""
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
        streams = [http.stream("POST", "/v1/completions", json=ENDLESS) for _ in range(count)]
        answers = [stack.enter_context(stream) for stream in streams]
        lines = [answer.iter_lines() for answer in answers]
        for each in lines:
            next(each)
        yield


@pytest.mark.long
@pytest.mark.parametrize("front_ends", ["2"])
def test_cores_of_two_nodes_are_one_server(long_model: Path, tmp_path: Path, front_ends: str) -> None:
    """Jobs stay on their core, on whichever node. A node that is killed under load is noticed within seconds,
    and the head goes on; a new node joins, and waits when the head has gone."""
    (port,) = free_ports(1)
    with ExitStack() as stack:
        node = stack.enter_context(running_node(long_model, port, tmp_path / "node"))
        flags = (*head_flags(port), "--api-server-count", front_ends)
        server = stack.enter_context(running_server(long_model, *flags))
        jobs_stay_at_home(server)
        a_node_is_killed(server, node)
        again = stack.enter_context(running_node(long_model, port, tmp_path / "again"))
        until(lambda: engine_states(server.url) == ["up", "up"])
        os.kill(again.core() or 0, signal.SIGKILL)
        until(lambda: engine_states(server.url) == ["up", "down"])
        until(lambda: engine_states(server.url) == ["up", "up"])
        assert server.interrupt() == 0
        until(lambda: again.core() is None)
        assert again.process.poll() is None, "it waits for the head to come back"
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(20) == 0


def jobs_stay_at_home(server: Server) -> None:
    assert engine_states(server.url) == ["up", "up"]
    jobs: dict[str, list[Body]] = {f"job-{number}": [] for number in range(6)}
    for _ in range(3):
        for name, said in jobs.items():
            usage = turn(server, said, name + " " + SENTENCE * 8, job_id=name)
            if len(said) > 2:
                assert usage["prompt_tokens_details"]["cached_tokens"] > 100
    until(lambda: sum(served_by(server)) >= 18)
    assert all(count >= 3 for count in served_by(server)), "both cores have served"


def a_node_is_killed(server: Server, node: Node) -> None:
    core = node.core()
    assert core is not None
    with endless_streams(server, 6):
        killed_at = time.monotonic()
        node.kill()
        until(lambda: "down" in engine_states(server.url))
        assert time.monotonic() - killed_at < 15.0
        until(lambda: not is_alive(core))
        assert turn(server, [], "still there?")["completion_tokens"] == 4


@pytest.mark.parametrize("front_ends", ["1"])
def test_a_core_is_added_while_the_server_serves(long_model: Path, tmp_path: Path, front_ends: str) -> None:
    """The head begins with its own core. A node that joins takes new jobs and leaves others at home; drained
    and stopped, it leaves without an error to any client."""
    (port,) = free_ports(1)
    flags = (*head_flags(port), "--data-parallel-size-min", "1", "--api-server-count", front_ends)
    with running_server(long_model, *flags) as server:
        assert engine_states(server.url) == ["up", "down"]
        first: list[Body] = []
        turn(server, first, SENTENCE * 8, job_id="first")
        with running_node(long_model, port, tmp_path / "node") as node:
            until(lambda: engine_states(server.url) == ["up", "up"])
            usage = turn(server, first, SENTENCE, job_id="first")
            assert usage["prompt_tokens_details"]["cached_tokens"] > 100
            for number in range(8):
                turn(server, [], f"{number} " + SENTENCE * 8, job_id=f"later-{number}")
            until(lambda: sum(served_by(server)) == 10)
            assert served_by(server)[1] >= 3
            assert httpx.post(server.url + "/drain?engine=1", timeout=60).status_code == 200
            for number in range(4):
                turn(server, [], f"{number} more " + SENTENCE * 8)
            node.process.send_signal(signal.SIGTERM)
            assert node.process.wait(20) == 0
        until(lambda: engine_states(server.url) == ["up", "down"])
        assert turn(server, first, SENTENCE, job_id="first")["completion_tokens"] == 4
        until(lambda: served_by(server)[0] >= 7)


def test_a_head_without_cores(long_model: Path, tmp_path: Path) -> None:
    """The head waits for its nodes, in any order, and serves when all are there."""
    (port,) = free_ports(1)
    with (
        running_node(long_model, port, tmp_path / "0", rank=0),
        running_node(long_model, port, tmp_path / "1", rank=1),
        running_server(long_model, *head_flags(port, num_local=0)) as server,
    ):
        assert engine_states(server.url) == ["up", "up"]
        assert turn(server, [], "hello")["completion_tokens"] == 4


def test_who_does_not_belong_is_refused(long_model: Path, tmp_path: Path) -> None:
    """Head and node report one sentence with the setting and both values; the head goes on waiting."""
    (port,) = free_ports(1)
    with (
        running_node(long_model, port, tmp_path / "other", "--max-model-len", "512") as other,
        running_node(long_model, port, tmp_path / "taken", rank=0) as taken,
        running_node(long_model, port, tmp_path / "good"),
        running_server(long_model, *head_flags(port), log=tmp_path / "head") as server,
    ):
        assert engine_states(server.url) == ["up", "up"]
        assert other.process.wait(WITHIN_S) == 2
        assert taken.process.wait(WITHIN_S) == 2
        sentence = "max_model_len is '32768' on the head, but '512' on the node"
        assert sentence in other.log.read_text()
        assert sentence in (tmp_path / "head").read_text()
        assert "cores 1 of the group run on nodes, not core 0" in taken.log.read_text()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--headless",), "headless needs data_parallel_size_local"),
        (("--data-parallel-size-local", "3"), "data_parallel_size_local must be from 0 to"),
        (("--data-parallel-start-rank", "1"), "data_parallel_start_rank is for headless"),
        (
            ("--data-parallel-size-min", "3"),
            "data_parallel_size_min must be from 1 to",
        ),
        (("--data-parallel-size-local", "1", "--data-parallel-address", "10.1.2.3"), "CONTINUUM_GROUP_TOKEN"),
    ],
)
def test_what_makes_no_group_is_said(long_model: Path, flags: tuple[str, ...], sentence: str) -> None:
    command = [sys.executable, "-m", "continuum.cli", "serve", str(long_model), "--data-parallel-size", "2"]
    command += [*flags, "--port", "0"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert sentence in ended.stderr


@pytest.mark.long
def test_cores_of_two_machines_share_experts(tmp_path: Path) -> None:
    """The cores connect over the port after the head's, and end and restart together."""
    model = make_model_folder(tmp_path / "moe", **VARIANTS["qwen3-moe"], max_position_embeddings=32768)
    port, shared = free_ports(1)[0], "--enable-expert-parallel"
    body = {"prompt": "one two three", "max_tokens": 8, "temperature": 0}

    def text(server: Server) -> str:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        said: str = answer.json()["choices"][0]["text"]
        return said

    with running_server(model, *LIMITS) as alone:
        wanted = text(alone)
    with ExitStack() as stack:
        node = stack.enter_context(running_node(model, port, tmp_path / "node", shared))
        server = stack.enter_context(running_server(model, *head_flags(port), shared))
        assert {text(server) for _ in range(4)} == {wanted}
        os.kill(node.core() or 0, signal.SIGKILL)
        until(lambda: engine_states(server.url) != ["up", "up"])
        until(lambda: engine_states(server.url) == ["up", "up"])
        assert {text(server) for _ in range(4)} == {wanted}
        assert server.interrupt() == 0
