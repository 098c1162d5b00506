"""However a frontend process ends, its core ends too; a core that ends alone is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from engine.core_process.core_client import SyncMPClient
from engine.errors import EngineDeadError
from engine.testing import FakeExecutorFactory
from engine.worker.loading.tiny_models import make_model_folder
from tests.processes.support import SignalPolicyFactory, config, core_request, has_gone
from tracing.events import TraceEnd
from tracing.reader import read_trace

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for foreign processes by pidfd")

ROOT = Path(__file__).parents[2]


@contextmanager
def front_end(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A Python process in its own process group, and the pid of its core, which it prints."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("state", ["idle", "busy", "stuck"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_the_core_ends_with_its_front_end(name: str, state: str, tmp_path: Path) -> None:
    """On any signal, even in the middle of a step that never ends, both are gone within two seconds."""
    with front_end("-m", "tests.processes.front_end", state, tmp_path) as (process, core_pid):
        if name == "SIGINT":  # a terminal sends it to the whole group
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.Signals[name])
        assert has_gone(core_pid)
        assert has_gone(process.pid)
    assert (tmp_path / "closed").read_text() == "closed", "the policy could not save what it learnt"
    assert isinstance(list(read_trace(tmp_path / "trace.jsonl"))[-1], TraceEnd)


@pytest.mark.slow
def test_a_script_without_a_main_guard_can_be_killed(tmp_path: Path) -> None:
    """A plain script that uses ``LLM`` with a real model is not run twice, and leaves no core behind."""
    folder = make_model_folder(tmp_path / "model")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            from engine.frontend.llm import LLM
            from engine.records.sampling_params import SamplingParams

            llm = LLM({str(folder)!r}, num_gpu_blocks_override=300)
            llm.generate("Hello", SamplingParams(max_tokens=4), use_tqdm=False)
            print(llm.engine._client.pid, flush=True)
            while True:
                llm.generate("Hello", SamplingParams(max_tokens=500, ignore_eos=True), use_tqdm=False)
        """)
    )
    with front_end(script) as (process, core_pid):
        process.kill()
        assert has_gone(core_pid)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_sigterm_to_the_core_alone_ends_it_cleanly(busy: bool, tmp_path: Path) -> None:
    """The core saves its state and exits with 0; its client raises EngineDeadError."""
    mark = tmp_path / "closed"
    client = SyncMPClient(config(), FakeExecutorFactory(), SignalPolicyFactory(mark))
    try:
        client.await_ready()
        if busy:
            client.add_request(core_request("a-1"))
            client.get_output()
        os.kill(client.pid, signal.SIGTERM)
        with pytest.raises(EngineDeadError):
            read_on(client)
    finally:
        client.close()
    assert client.exit_code == 0
    assert mark.exists()


def read_on(client: SyncMPClient) -> NoReturn:
    while True:
        client.get_output()


def test_sigint_to_the_core_is_left_to_the_front_end() -> None:
    """Ctrl-C reaches the whole group; the core goes on until its frontend ends it."""
    client = SyncMPClient(config(), FakeExecutorFactory(), SignalPolicyFactory())
    try:
        client.await_ready()
        os.kill(client.pid, signal.SIGINT)
        assert client.call_utility("statistics")["num_running"] == 0
        assert not client.dead
    finally:
        client.close()
    assert client.exit_code == 0
