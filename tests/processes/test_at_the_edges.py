"""A server whose processes are stopped, killed or terminated at odd moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from engine.api.openai_responses.sqlite_store import SqliteStore
from engine.api.openai_responses.store import StoreLimits
from engine.process.private_folder import make_private_folder, remove_if_left, remove_private_folder
from engine.worker.loading.tiny_models import make_model_folder
from tests.processes.crowd import Crowd, running_crowd
from tests.processes.support import until

FLAGS = ("--num-gpu-blocks-override", "8200", "--max-model-len", "32768", "--core-silence-s", "1")
ENDLESS = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True, "stream": True}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    model = make_model_folder(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=32768)
    with running_crowd(model, *FLAGS) as running:
        yield running


def health(crowd: Crowd) -> int:
    return httpx.get(f"{crowd.url}/health", timeout=30).status_code


def test_a_front_end_that_is_told_to_stop_takes_no_more(crowd: Crowd) -> None:
    """The process finishes its requests; its sibling answers new ones, and none is refused."""
    victim = crowd.front_end_pids()[0]
    with ExitStack() as stack:
        client = stack.enter_context(crowd.client_of(victim))
        stream = stack.enter_context(client.stream("POST", "/v1/completions", json=ENDLESS))
        lines = stream.iter_lines()
        assert next(lines)
        os.kill(victim, signal.SIGTERM)
        for _ in range(40):
            models = httpx.get(f"{crowd.url}/v1/models", timeout=30)
            assert models.status_code == 200, models.text
            # /health also reports a core that a busy machine delays for a second.
            assert "shutting down" not in httpx.get(f"{crowd.url}/health", timeout=30).text
        assert any(lines)
    until(lambda: len(crowd.front_end_pids()) == 2 and victim not in crowd.front_end_pids())


def test_a_core_that_stands_still_is_told(crowd: Crowd) -> None:
    """While a core is stopped, /health is 503 after the configured time, and 200 when it resumes."""
    until(lambda: health(crowd) == 200)
    os.kill(crowd.core_pid(), signal.SIGSTOP)
    try:
        until(lambda: health(crowd) == 503)
    finally:
        os.kill(crowd.core_pid(), signal.SIGCONT)
    until(lambda: health(crowd) == 200)


def test_an_interrupt_while_it_is_loaded_leaves_no_traceback() -> None:
    """Ctrl-C during the imports leaves no traceback. Now and then an interrupt that comes while Python runs a
    callback is lost: then another attempt counts."""
    for _ in range(3):
        code, told = _interrupted_as_it_is_loaded()
        if code != -signal.SIGKILL:
            assert code in (-signal.SIGINT, 130)
            assert not any("Traceback" in line for line in told)
            return
    pytest.fail("every interrupt was lost")


def _interrupted_as_it_is_loaded() -> tuple[int, list[str]]:
    """Returns exit code and error output; kills the process if it goes on."""
    command = [sys.executable, "-X", "importtime", "-m", "continuum.cli.main", "serve"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    killer = threading.Timer(30.0, process.kill)
    killer.start()
    lines = iter(process.stderr.readline, "")
    told = [line for line in lines if "continuum.config" not in line or _stop(process)]
    code = process.wait(30)
    killer.cancel()
    process.stderr.close()
    return code, told


def _stop(process: subprocess.Popen[str]) -> bool:
    process.send_signal(signal.SIGINT)
    return True


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_server_left_goes_with_the_next_start(temporary: Path) -> None:
    """The next start removes the folder, which may hold prompts and answers, but no running server's."""
    code = f"""
import os, signal, tempfile
tempfile.tempdir = {str(temporary)!r}
from engine.process.private_folder import make_private_folder
open(make_private_folder("continuum-") + "/prompts", "w").write("secret")
os.kill(os.getpid(), signal.SIGKILL)
"""
    own = Path(make_private_folder("continuum-"))
    other = temporary / "continuum-of-somebody"
    other.mkdir()
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(list(temporary.glob("continuum-*/prompts"))) == 1
    second = Path(make_private_folder("continuum-"))
    assert not list(temporary.glob("continuum-*/prompts"))
    assert {own, second, other} == set(temporary.iterdir())
    assert own.stat().st_mode & 0o077 == 0
    for folder in (own, second):
        remove_private_folder(str(folder))
        assert remove_if_left(folder)


async def test_a_lock_does_not_end_because_the_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """API servers share a monotonic clock: setting the wall clock an hour ahead or back changes nothing."""
    store = SqliteStore(tmp_path, StoreLimits())
    assert await store.lock("conversation", "first")
    now = time.time()
    for later_s in (3600, -3600):
        monkeypatch.setattr(time, "time", lambda later_s=later_s: now + later_s)
        assert not await store.lock("conversation", "second")
    store.close()
