"""Promises about the server as a process: when it, its core or its start fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from continuum.cli.main import main
from engine.api.config import ServerConfig
from engine.api.processes.listener import begin_listening, bound_socket
from engine.errors import EngineError
from tests.api.server import Server, is_alive, only_complaint, running_server
from tests.processes.event_subscriber import free_ports

ENDLESS = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
FLAGS = ("--num-gpu-blocks-override", "2100", "--max-model-len", "32768", "--scheduling-policy", "fcfs")


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose context is so long that a request outlives the test's actions."""
    from engine.worker.loading.tiny_models import make_model_folder

    return make_model_folder(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=32768)


def last_events(server: Server, number: signal.Signals, target: int) -> tuple[list[str], float]:
    """Opens a stream and sends a signal once it flows; returns its later events and how long they took."""
    rest: list[str] = []
    signalled_at = 0.0
    with (
        httpx.Client(base_url=server.url, timeout=20) as client,
        client.stream("POST", "/v1/completions", json=ENDLESS) as response,
    ):
        for line in filter(None, response.iter_lines()):
            if not signalled_at:
                signalled_at = time.monotonic()
                os.kill(target, number)
            else:
                rest.append(line.removeprefix("data: "))
    return rest, time.monotonic() - signalled_at


@pytest.mark.slow
def test_only_the_core_holds_torch(model: Path) -> None:
    """An API server process tokenizes, renders and streams without loading torch."""
    with running_server(model, "--num-gpu-blocks-override", "100", "--quantization", "int8") as server:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        maps = [Path(f"/proc/{pid}/maps").read_bytes() for pid in (server.process.pid, server.core_pid())]
        assert [b"libtorch" in each for each in maps] == [False, True]


@pytest.mark.slow
def test_when_the_core_is_killed_streams_end_and_the_server_leaves(long_model: Path) -> None:
    """After kill -9 of the core every stream gets an error within 2 s, then 503, and exit code 1."""
    with running_server(long_model, *FLAGS) as server:
        events, seconds = last_events(server, signal.SIGKILL, server.core_pid())
        assert seconds < 2
        assert events[-1] == "[DONE]"
        error = json.loads(events[-2])["error"]
        assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert server.wait(8) == 1


@pytest.mark.slow
def test_a_polite_end(long_model: Path) -> None:
    """After SIGTERM running requests get the grace period, then an error; exit code 0, and no core is
    left."""
    with running_server(long_model, *FLAGS, "--shutdown-grace-s", "0.5") as server:
        core = server.core_pid()
        events, seconds = last_events(server, signal.SIGTERM, server.process.pid)
        assert len(events) > 3  # It ran on for a while.
        assert 0.4 < seconds < 4
        assert events[-1] == "[DONE]"
        assert "shutting down" in json.loads(events[-2])["error"]["message"]
        assert server.wait(8) == 0
        assert not is_alive(core)


@pytest.mark.slow
def test_a_killed_server_takes_its_core_along(long_model: Path, tmp_path: Path) -> None:
    """After kill -9 of a server (on a Unix socket) its core is gone within 2 s."""
    path = tmp_path / "s"
    with running_server(long_model, *FLAGS, "--uds", str(path)) as server:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
            assert client.get("/health").status_code == 200
        core = server.core_pid()
        server.process.kill()
        deadline = time.monotonic() + 2
        while is_alive(core):
            assert time.monotonic() < deadline


def start_up_error(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    """Returns the one line that a failed start leaves on stderr."""
    assert main(["serve", *arguments]) == code
    return only_complaint(capsys.readouterr().err)


def test_a_missing_model_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A missing folder is reported without a traceback."""
    assert "nowhere" in start_up_error(capsys, str(tmp_path / "nowhere"), "--port", "0")


def test_a_port_in_use_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A port in use is reported before the model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = start_up_error(capsys, str(tmp_path), "--host", "127.0.0.1", "--port", str(port))
    assert f"127.0.0.1:{port}" in line
    assert "in use" in line


def bound(port: int) -> socket.socket:
    """The socket of a server that is still loading its model."""
    return bound_socket(ServerConfig(served_model_names=("tiny",), host="127.0.0.1", port=port))


@pytest.mark.parametrize("chosen", [False, True], ids=["by the system", "by the user"])
def test_a_port_is_kept_while_the_model_loads(chosen: bool) -> None:
    """Neither another server nor any other listener can take the port, given or chosen by the system."""
    port = free_ports(1)[0] if chosen else 0
    with bound(port) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(EngineError, match=f"127.0.0.1:{port}: Address already in use"):
            bound(port)
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))


def test_a_port_can_be_had_again_while_its_connections_end() -> None:
    """A restarted server can use the port at once, while old connections are still closing."""
    with bound(0) as sock:
        begin_listening(ServerConfig(served_model_names=("tiny",)), sock, 1)
        port = sock.getsockname()[1]
        asking = socket.create_connection(("127.0.0.1", port))
        answering, _ = sock.accept()
    with asking, answering:
        answering.close()  # This side closes first, so it is the one in TIME_WAIT.
        assert asking.recv(1) == b""
    with bound(port) as again:
        begin_listening(ServerConfig(served_model_names=("tiny",)), again, 1)


STOLEN = """
import socket, sys
from engine.api.processes import server
from continuum.cli.main import main

ours = socket.socket()
ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
ours.bind(("127.0.0.1", 0))
theirs = socket.create_server(ours.getsockname())
server.bound_socket = lambda config: ours
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", ["1", "2"])
def test_why_a_server_cannot_listen(long_model: Path, count: str) -> None:
    """The error gives the system's reason, whatever the event loop makes of it."""
    flags = ("--host", "127.0.0.1", "--port", "0", "--api-server-count", count)
    done = subprocess.run(
        [sys.executable, "-c", STOLEN, "serve", str(long_model), *FLAGS, *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    said = r"Cannot listen on 127\.0\.0\.1:[1-9]\d+: Address already in use\."
    assert re.search(said, done.stderr.splitlines()[-1])


@pytest.mark.slow
def test_an_unknown_architecture_is_one_sentence(
    capsys: pytest.CaptureFixture[str], long_model: Path, tmp_path: Path
) -> None:
    """An unsupported architecture is refused by name, without further warnings."""
    folder = tmp_path / "model"
    shutil.copytree(long_model, folder)
    config = {"model_type": "foo", "architectures": ["FooForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert "'FooForCausalLM'" in start_up_error(capsys, str(folder), "--port", "0")


@pytest.mark.slow
def test_too_little_memory_is_one_sentence(capsys: pytest.CaptureFixture[str], long_model: Path) -> None:
    """An error that the core finds at its start reaches the user unchanged."""
    line = start_up_error(
        capsys,
        str(long_model),
        "--port",
        "0",
        "--num-gpu-blocks-override",
        "10",
        "--scheduling-policy",
        "fcfs",
    )
    assert "maximum context length" in line
