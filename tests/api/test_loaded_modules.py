"""A server does not load libraries of hundreds of megabytes that it does not need."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import running_server

pytestmark = pytest.mark.slow

COMPILERS = ("triton", "sympy", "torch._dynamo", "torch._inductor")
MODELLING = ("transformers.modeling_utils", "transformers.activations", "transformers.models.llama")
SCIENCE = ("sklearn", "scipy", "pandas")
OF_FRONT_ENDS = ("fastapi", "pydantic", "uvicorn", "tokenizers")
OF_THE_CORE = ("torch", "safetensors", "engine.worker")
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 0}


class ServerThatTells:
    """Lists the modules that the API server process and the core have loaded after the first answer."""

    def __init__(self, model: Path, folder: Path) -> None:
        environment = {
            "PYTHONPATH": str(Path(__file__).with_name("telling_modules")),
            "LOADED_MODULES": str(folder),
        }
        with running_server(model, "--num-gpu-blocks-override", "300", environment=environment) as server:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
            assert answer.status_code == 200, answer.text
            self.in_front_end = loaded_modules(server.process.pid, folder)
            self.in_core = loaded_modules(server.core_pid(), folder)


@pytest.fixture(scope="module")
def native(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ServerThatTells:
    """A server of a model with a native implementation."""
    return ServerThatTells(model, tmp_path_factory.mktemp("pipes"))


def loaded_modules(pid: int, folder: Path) -> frozenset[str]:
    pipe = folder / str(pid)
    os.mkfifo(pipe)
    os.kill(pid, signal.SIGUSR2)
    return frozenset(pipe.read_text().split())


def within(loaded: Collection[str], packages: Collection[str]) -> list[str]:
    """Those of these packages that were loaded."""
    return [package for package in packages if package in loaded]


def pages_of_files(pid: int) -> int:
    """The KiB of file-backed memory of a process."""
    return int(Path(f"/proc/{pid}/status").read_text().split("RssFile:")[1].split()[0])


def test_a_native_model_is_served_without_what_it_has_no_use_for(native: ServerThatTells) -> None:
    """No compiler and no model code of transformers is loaded; torch only in the core, web and text libraries
    only outside of it."""
    assert within(native.in_front_end, (*COMPILERS, *MODELLING, *SCIENCE, *OF_THE_CORE)) == []
    assert within(native.in_core, (*COMPILERS, *MODELLING, *SCIENCE, *OF_FRONT_ENDS)) == []
    assert within(native.in_core, OF_THE_CORE) == list(OF_THE_CORE)


def test_garbage_is_collected_once_the_start_is_over(native: ServerThatTells) -> None:
    """Garbage collection is on in both processes after the start, though the core loads without it."""
    assert "gc.isenabled" in native.in_front_end
    assert "gc.isenabled" in native.in_core


@pytest.mark.long
def test_another_model_gets_what_it_needs(tmp_path: Path) -> None:
    """A model that transformers computes is served as well."""
    server = ServerThatTells(make_model_folder(tmp_path / "model", "gpt_neox"), tmp_path)
    assert "transformers.modeling_utils" in server.in_core
    assert within(server.in_front_end, OF_THE_CORE) == []


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell")
def test_what_the_first_requests_have_touched_goes_when_they_are_done(model: Path) -> None:
    """At the first idle time after requests both processes release the file pages they touched; the next
    answer is unchanged."""
    with running_server(model, "--num-gpu-blocks-override", "300") as server:
        most = dict.fromkeys((server.process.pid, server.core_pid()), 0)

        def ask() -> str:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
            most.update({pid: max(held, pages_of_files(pid)) for pid, held in most.items()})
            return str(answer.json()["choices"][0]["message"]["content"])

        def hold_them() -> bool:
            return any(pages_of_files(pid) > 0.8 * held for pid, held in most.items())

        said = {ask() for _ in range(20)}
        for _ in range(600):
            if not hold_them():
                break
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(0.1)
        assert not hold_them()
        assert {ask()} == said
