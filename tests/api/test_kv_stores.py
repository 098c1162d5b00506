"""Stores of others keep KV for all servers: one in a test's file, Redis, Mooncake's and LMCache's."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import fakeredis
import pytest

from continuum.cli.main import main
from tests.api.server import running_server
from tests.api.test_kv_transfer import FLAGS, cached_tokens, completion, gauge, post
from tests.api.test_saved_kv import NOT_WORTH_LOADING, exit_of, turn
from tests.processes.event_subscriber import free_ports
from tests.reliability.operators import SQLITE

STORES = ("sqlite", "redis", "mooncake", "lmcache")


def flags(
    connector: str, module: str | None = None, role: str = "kv_both", **options: Any
) -> tuple[str, ...]:
    config: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": role,
        "kv_connector_extra_config": options,
    }
    if module is not None:
        config["kv_connector_module_path"] = module
    return (*FLAGS, "--kv-transfer-config", json.dumps(config))


@contextmanager
def running_store(name: str, folder: Path) -> Iterator[tuple[str, ...]]:
    """Starts a store; yields the flags of a server that uses it."""
    (port,) = free_ports(1)
    if name == "sqlite":
        yield flags("SqliteStore", SQLITE, file=str(folder / "kv.sqlite"))
    elif name == "redis":
        with running_redis(port):
            yield flags("RedisStore", "examples.redis_store", url=f"redis://127.0.0.1:{port}")
    elif name == "mooncake":
        if importlib.util.find_spec("mooncake") is None:
            pytest.skip("mooncake-transfer-engine is not installed")
        master = shutil.which("mooncake_master") or str(Path(sys.executable).with_name("mooncake_master"))
        with _process([master, "--rpc_port", str(port)], port):
            yield flags("MooncakeStoreConnector", master=f"127.0.0.1:{port}", global_segment_size=64 * 2**20)
    else:
        if importlib.util.find_spec("lmcache") is None:
            pytest.skip("lmcache is not installed")
        with _process([sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)], port):
            yield flags("LMCacheServerConnector", server=f"127.0.0.1:{port}")


@contextmanager
def running_redis(port: int) -> Iterator[None]:
    """Redis' protocol and commands over TCP, in this process."""
    server = fakeredis.TcpFakeServer(("127.0.0.1", port))
    Thread(target=server.serve_forever, daemon=True).start()
    with closing(server.socket):
        yield
        server.shutdown()


@contextmanager
def _process(command: list[str], port: int) -> Iterator[None]:
    """Runs a store's own server, and waits until it listens."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_it_listens(port)
        yield
    finally:
        process.kill()
        process.wait()


def _wait_until_it_listens(port: int) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", STORES)
def test_a_job_goes_on_elsewhere(name: str, model_folder: Path, tmp_path: Path) -> None:
    """A turn finds its history's KV on another server, with its tokens; both traces replay."""
    traces = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    messages = [{"role": "user", "content": "Read the file, and say what is in it. " * 5}]
    with running_server(model_folder, *FLAGS) as alone:
        expected = turn(alone, messages).choices[0].message.content
    with (
        running_store(name, tmp_path) as given,
        running_server(model_folder, *given, "--trace", str(traces[0])) as one,
        running_server(model_folder, *given, "--trace", str(traces[1])) as two,
    ):
        history = 0
        for number in range(4):
            answer = turn((one, two)[number % 2], messages)
            if number:
                assert answer.usage.prompt_tokens_details.cached_tokens > history - NOT_WORTH_LOADING
            else:
                assert answer.choices[0].message.content == expected
            history = answer.usage.prompt_tokens
            said = {"role": "assistant", "content": answer.choices[0].message.content}
            messages += [said, {"role": "user", "content": f"And what is in file {number}?"}]
        assert gauge(two, "continuum:remote_kv_loaded_tokens_total") > 0
        os.kill(two.core_pid(), signal.SIGKILL)
        assert one.interrupt() == 0
    assert main(["trace", "replay", str(traces[0])]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["ask", "all", "read", "write"])
def test_a_store_that_fails_costs_recomputation(fault: str, model_folder: Path, tmp_path: Path) -> None:
    """Tokens stay right, and the server goes on."""
    given = flags("SqliteStore", SQLITE, file=str(tmp_path / "kv"), fault=str(tmp_path / "fault"))
    with running_server(model_folder, *FLAGS) as alone:
        expected = [post(alone, "/v1/completions", completion(seed))["choices"] for seed in range(3)]
    with running_server(model_folder, *given) as one:
        assert [post(one, "/v1/completions", completion(seed))["choices"] for seed in range(2)] == expected[
            :2
        ]
        one.interrupt()
    (tmp_path / "fault").write_text(fault)
    with running_server(model_folder, *given, log=tmp_path / "log") as two:
        answers = [post(two, "/v1/completions", completion(seed)) for seed in range(3)]
        assert [answer["choices"] for answer in answers] == expected
        held = 192 * (fault in ("all", "write"))
        assert [cached_tokens(answer) for answer in answers] == [held, held, 0]
        assert two.interrupt() == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("RedisStore", "no.such_module"), "no.such_module cannot be imported"),
        (("NoStore", SQLITE), "kv_connector: NoStore of tests.reliability.sqlite_store is not a class there"),
        (("Path", SQLITE), "kv_connector: Path of tests.reliability.sqlite_store has no num_held()"),
        (("SqliteStore", SQLITE), "kv_connector_extra_config needs file."),
        (("LMCacheServerConnector", None), "kv_connector_extra_config needs server."),
    ],
)
def test_a_store_that_cannot_be_used_is_said(
    given: tuple[str, str | None], said: str, model_folder: Path
) -> None:
    code, log = exit_of(model_folder, flags(*given))
    assert code == 2
    assert said in log
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_server_that_is_not_there_is_said(model_folder: Path) -> None:
    (port,) = free_ports(1)
    for connector, module, options, said in (
        ("LMCacheServerConnector", None, {"server": f"127.0.0.1:{port}"}, "no LMCache server at 127.0.0.1"),
        ("RedisStore", "examples.redis_store", {"url": f"redis://127.0.0.1:{port}"}, "could not start: "),
    ):
        code, log = exit_of(model_folder, flags(connector, module, **options))
        assert code == 2
        assert said in log
        assert "Traceback" not in log
