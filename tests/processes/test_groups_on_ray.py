"""A group whose cores Ray places: a real cluster of three nodes, each with a CPU for one core."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.server import Server, is_alive, running_server
from tests.child_processes import processes_with
from tests.processes.event_subscriber import free_ports
from tests.processes.support import engine_states, until
from tests.ray_cluster import MARK, add_node, cluster
from tests.worker.generation import Reference, random_tokens

__all__ = ["cluster"]  # a fixture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc"),
    pytest.mark.timeout(400),
]

LIMITS = ("--device", "cpu", "--max-model-len", "4096", "--num-gpu-blocks-override", "400")
GROUP = ("--data-parallel-size", "3", "--data-parallel-backend", "ray")
Body = dict[str, Any]


def cores() -> set[int]:
    """Process ids of the cores on this test's cluster."""
    return processes_with("engine.core_process.core_proc", f"{MARK}={os.environ[MARK]}")


def complete(server: Server, prompt: list[int], **fields: Any) -> Body:
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    done: Body = answer.json()
    return done


@pytest.mark.long
def test_cores_on_three_nodes_are_one_server(model_folder: Path, cluster: Any, tmp_path: Path) -> None:
    """Jobs stay on their cores and get transformers' tokens. A node that is killed under load ends only its
    requests; Ray starts its core on a new node. At the end no process is left."""
    doomed = [add_node(cluster), add_node(cluster)][0]
    folder, (port,) = model_folder, free_ports(1)
    flags = (*LIMITS, *GROUP, "--data-parallel-rpc-port", str(port))
    with running_server(folder, *flags, log=tmp_path / "log") as server:
        assert engine_states(server.url) == ["up", "up", "up"]
        assert len(cores()) == 3
        assert not server.core_pids(), "all are Ray's"
        jobs_have_the_right_tokens(server, Reference(folder))
        before = cores()
        a_node_is_killed(server, cluster, doomed)
        assert len(cores() & before) == 2
        add_node(cluster)
        until(lambda: engine_states(server.url) == ["up", "up", "up"])
        left = cores()
        assert len(left) == 3
        assert server.interrupt() == 0
        until(lambda: not any(is_alive(core) for core in left))


@pytest.mark.long
def test_processes_that_are_killed_are_started_again_or_end(
    model_folder: Path, cluster: Any, tmp_path: Path
) -> None:
    """A server begins with the one core that fits and gets the other when a node joins. Ray restarts a killed
    node process, and with it its core; the cores of a killed head end."""
    (port,) = free_ports(1)
    group = ("--data-parallel-size", "2", "--data-parallel-size-min", "1", "--data-parallel-backend", "ray")
    flags = (*LIMITS, *group, "--data-parallel-rpc-port", str(port))
    with running_server(model_folder, *flags, log=tmp_path / "log") as server:
        assert sorted(engine_states(server.url)) == ["down", "up"]
        assert "has 1 CPU and 0 GPU; 2 engine cores need 2 CPU" in (tmp_path / "log").read_text()
        add_node(cluster)
        until(lambda: engine_states(server.url) == ["up", "up"])
        before = cores()
        mark = f"{MARK}={os.environ[MARK]}"
        os.kill(min(processes_with("engine.core_group.ray_node_proc", mark)), signal.SIGKILL)
        until(lambda: len(cores() - before) == 1)
        until(lambda: engine_states(server.url) == ["up", "up"])
        left = cores()
        server.process.kill()
        until(lambda: not any(is_alive(core) for core in left))


def jobs_have_the_right_tokens(server: Server, reference: Reference) -> None:
    prompts = {f"job-{number}": random_tokens(200, seed=number) for number in range(9)}
    for turn in range(2):
        for name, prompt in prompts.items():
            done = complete(server, prompt, max_tokens=6, job_id=name)
            (choice,) = done["choices"]
            assert choice["token_ids"] == reference.greedy(prompt, 6)
            if turn:
                assert done["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192
            prompts[name] = prompt + choice["token_ids"]
    used = httpx.get(server.url + "/metrics", timeout=60).text
    engines = [line for line in used.splitlines() if line.startswith("vllm:prompt_tokens_total{")]
    assert len(engines) == 3
    assert all(float(line.split()[-1]) > 0 for line in engines), "all cores have served"


def a_node_is_killed(server: Server, cluster: Any, node: Any) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        streams = [http.stream("POST", "/v1/completions", json=body) for _ in range(6)]
        lines = [stream.__enter__().iter_lines() for stream in streams]
        for each in lines:
            next(each)
        cluster.remove_node(node, allow_graceful=False)
        until(lambda: "down" in engine_states(server.url))
        assert len(complete(server, [4, 5], max_tokens=3)["choices"]) == 1
        said = ["\n".join(each) for each in lines]
        for stream in streams:
            stream.__exit__(None, None, None)
    ended = [text for text in said if '"error"' in text]
    assert 1 <= len(ended) <= 4, "those of the killed node only"
    assert all("[DONE]" in text for text in said if text not in ended)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--data-parallel-backend", "ray"), "data_parallel_backend ray needs data_parallel_size above 1"),
        ((*GROUP, "--headless", "--data-parallel-size-local", "1"), "headless must be off"),
        ((*GROUP, "--distributed-executor-backend", "ray"), "needs distributed_executor_backend mp"),
        (GROUP, "RAY_ADDRESS: no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_what_makes_no_group_is_said(model_folder: Path, flags: tuple[str, ...], sentence: str) -> None:
    command = [sys.executable, "-m", "continuum.cli", "serve", str(model_folder), *flags, "--port", "0"]
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == 2
    assert sentence in ended.stderr
