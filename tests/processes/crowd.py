"""A real server with several API server processes, and clients that know which one they are connected to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.api.server import Server, is_alive, running_server
from tests.child_processes import children_of

WITHIN_S = 60.0
"""Timeout for what takes a moment, on a machine with other work."""
ONE_CONNECTION = httpx.Limits(max_connections=1)


class Crowd:
    """A running server and its processes."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url

    def core_pid(self) -> int:
        return self._children("engine.core_process.core_proc")[0]

    def front_end_pids(self) -> list[int]:
        return self._children("engine.api.processes.api_server")

    def all_pids(self) -> list[int]:
        return [self.server.process.pid, self.core_pid(), *self.front_end_pids()]

    def _children(self, module: str) -> list[int]:
        return children_of(self.server.process.pid, f"from {module} import")

    def folder(self) -> Path:
        """The folder that the API server processes share."""
        environment = Path(f"/proc/{self.front_end_pids()[0]}/environ").read_text().split("\0")
        [metrics] = [line for line in environment if line.startswith("PROMETHEUS_MULTIPROC_DIR=")]
        return Path(metrics.partition("=")[2]).parent

    @contextmanager
    def client_of_each(self, count: int = 2) -> Iterator[dict[int, httpx.Client]]:
        """One client for each API server, by pid: a connection stays with the process that accepted it."""
        clients: dict[int, httpx.Client] = {}
        deadline = time.monotonic() + WITHIN_S
        with ExitStack() as stack:
            while len(clients) < count:
                assert time.monotonic() < deadline, f"only {clients.keys()} have answered"
                client = httpx.Client(base_url=self.url, timeout=30, limits=ONE_CONNECTION)
                if clients.setdefault(process_of(client), client) is client:
                    stack.callback(client.close)
                else:
                    client.close()
            yield clients

    @contextmanager
    def client_of(self, pid: int) -> Iterator[httpx.Client]:
        """A client that is connected to this API server process."""
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            with httpx.Client(base_url=self.url, timeout=30, limits=ONE_CONNECTION) as client:
                if process_of(client) == pid:
                    yield client
                    return
        raise AssertionError(f"{pid} takes no connection")


@contextmanager
def running_crowd(model: Path, *flags: str) -> Iterator[Crowd]:
    with running_server(model, "--api-server-count", "2", *flags) as server:
        yield Crowd(server)


def process_of(client: httpx.Client) -> int:
    """The API server process that this client's one connection belongs to."""
    pid = client.get("/load").json()["process_id"]
    assert isinstance(pid, int)
    return pid


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    """A series' value, summed over the labels that are not named; 0 if the series is missing."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(name + "{") and all(part in line for part in wanted)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def until_metric(client: httpx.Client, name: str, value: float) -> None:
    """Waits for the value: metrics follow the core's report, one message after the answer."""
    deadline = time.monotonic() + WITHIN_S
    while (found := metric(client, name)) != value:
        assert time.monotonic() < deadline, f"{name} stayed at {found}"


def until_gone(pids: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if is_alive(pid)]
