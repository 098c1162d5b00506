"""Engine cores that divide a model's experts among them: each token goes through the experts of all cores."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from continuum.cli.main import main
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, is_alive, running_server
from tests.processes.support import GONE_WITHIN_S, engine_states, has_gone, until
from tests.worker.conftest import VARIANTS
from tests.worker.generation import random_tokens

FLAGS = ("--num-gpu-blocks-override", "520", "--max-model-len", "4096")
SHARED = ("--data-parallel-size", "2", "--enable-expert-parallel")
PROMPTS = [random_tokens(length, seed=length) for length in (3, 40, 17, 90, 5, 33)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc"),
    pytest.mark.timeout(240),
]


def folder_of(name: str, tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / name, **VARIANTS[name], max_position_embeddings=4096)


def answers(url: str, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Greedy tokens of prompts that run at the same time."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: answer(url, prompt), prompts))


def answer(url: str, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60)
    assert reply.status_code == 200, reply.text
    token_ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return token_ids


def listening_at(pid: int) -> set[str]:
    """The addresses at which a process listens over IPv4 and IPv6, in the kernel's format."""
    sockets = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(os.readlink(each))
    lines = [
        line for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    fields = [line.split() for line in lines if " 0A " in line]
    return {each[1].partition(":")[0] for each in fields if f"socket:[{each[9]}]" in sockets}


def num_answers(url: str) -> list[float]:
    """The number of answers of each core."""
    counts = [0.0, 0.0]
    for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines():
        if line.startswith("vllm:request_success_total{"):
            counts[int(line.partition('engine="')[2].partition('"')[0])] += float(line.split()[-1])
    return counts


@contextmanager
def shared(folder: Path, *flags: str) -> Iterator[Server]:
    """A server whose cores share experts; at its end no process is left."""
    with running_server(folder, *FLAGS, *SHARED, *flags) as server:
        yield server
        cores = server.core_pids()
        assert server.interrupt() == 0
        assert not any(map(is_alive, cores))


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("gpt-oss", ()),
        pytest.param("glm4-moe", ("--tensor-parallel-size", "2"), marks=pytest.mark.long),
    ],
)
def test_the_tokens_are_those_of_one_core(name: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Tokens are the same on either core, in concurrent requests and while the other core is idle."""
    folder = folder_of(name, tmp_path)
    with running_server(folder, *FLAGS) as alone:
        wanted = answers(alone.url)
    with shared(folder, *flags) as server:
        assert [answer(server.url, prompt) for prompt in PROMPTS] == wanted
        assert answers(server.url) == wanted
        assert all(num_answers(server.url)), "both cores had some"


@pytest.mark.long
def test_they_end_and_come_back_together(tmp_path: Path) -> None:
    """One core is killed while both have requests, then another while nothing runs: both restart together."""
    endless = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with (
        shared(folder_of("qwen3-moe", tmp_path), "--api-server-count", "2") as server,
        ThreadPoolExecutor(4) as pool,
    ):
        wanted = answers(server.url)
        assert {each for core in server.core_pids() for each in listening_at(core)} == {"0100007F"}, (
            "loopback"
        )
        streams = [
            pool.submit(httpx.post, f"{server.url}/v1/completions", json=endless, timeout=60)
            for _ in range(4)
        ]
        until(lambda: all(engine["num_open"] for engine in engines(server.url)))
        first, second = server.core_pids()
        os.kill(second, signal.SIGKILL)
        assert has_gone(first, 2 * GONE_WITHIN_S)
        assert all('"error"' in stream.result().text for stream in streams)
        until(lambda: engine_states(server.url) == ["up", "up"])
        assert answers(server.url) == wanted
        os.kill(server.core_pids()[0], signal.SIGKILL)
        until(lambda: engine_states(server.url) != ["up", "up"])
        until(lambda: engine_states(server.url) == ["up", "up"])
        assert answers(server.url) == wanted


def engines(url: str) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = httpx.get(f"{url}/engines", timeout=60).json()["data"]
    return data


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--pipeline-parallel-size", "2"), "pipeline_parallel_size > 1"),
        (("--async-scheduling",), "async_scheduling"),
        (("--enable-return-routed-experts",), "enable_return_routed_experts"),
        (("--data-parallel-size-min", "1"), "data_parallel_size_min"),
        (("--data-parallel-backend", "ray"), "data_parallel_backend ray"),
    ],
)
def test_what_they_cannot_do_is_refused(
    flags: tuple[str, ...], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):
        assert main(["serve", str(tmp_path), *SHARED, *flags]) == 2
    sentence = f"{named} and enable_expert_parallel with data_parallel_size > 1"
    assert sentence in capsys.readouterr().err


def test_a_number_of_experts_that_cannot_be_divided_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A number of cores that does not divide the experts is refused by its flag, once the model is known."""
    folder = folder_of("gpt-oss", tmp_path)
    flags = ("--port", "0", *FLAGS, "--data-parallel-size", "4", "--enable-expert-parallel")
    assert main(["serve", str(folder), *flags]) == 2
    assert "--data-parallel-size: data_parallel_size is 4" in capfd.readouterr().err
