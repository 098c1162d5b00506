"""Strangers at the ports between processes and servers: ``python -m tests.reliability.doors``. Starts its
servers, prints a line for each attack, and exits with 1 if a bound is broken.

For figures of another commit, run this file with that checkout as the working directory.
"""

from __future__ import annotations

import http.server
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from tests.api.server import Server
from tests.processes.event_subscriber import free_ports
from tests.reliability.attacked import attacked_server, resident_mib

ANNOUNCED = 64 * 2**20
CONNECTIONS = 24
MOST_MIB = 64
"""If strangers at a port take more memory than this, it is a fault."""
TEXT = " ".join(f"ledger {number * 7919 % 1000} north" for number in range(250))
WAIT_S = 20.0


def main() -> int:
    attacks = (_announced_bytes, _false_leases, _told_prompts, _route_that_watches, _route_that_reads)
    faults = sum(not attack() for attack in attacks)
    print(f"doors: {faults} bounds broken")
    return min(faults, 1)


def _transfer(role: str, port: int) -> tuple[str, str]:
    extra = {"allowed_ports": ["1024-65535"]}
    config = {"kv_connector": "TCPConnector", "kv_role": role, "kv_port": port}
    return "--kv-transfer-config", json.dumps({**config, "kv_connector_extra_config": extra})


def _announced_bytes() -> bool:
    """Four bytes to the KV port announce 64 MiB; a byte now and then keeps the connection open."""
    (port,) = free_ports(1)
    with attacked_server(*_transfer("kv_producer", port)) as server:
        warm = {"prompt": TEXT, "max_tokens": 2, "kv_transfer_params": {"do_remote_decode": True}}
        httpx.post(server.url + "/v1/completions", json=warm, timeout=60)
        before = resident_mib(server.core_pid())
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        for number in range(6):
            for each in held:
                with suppress(OSError):
                    each.sendall((struct.pack("!I", ANNOUNCED) if not number else b"") + b"\0")
            time.sleep(0.5)
        after = resident_mib(server.core_pid())
        for each in held:
            each.close()
    print(f"{CONNECTIONS} x 4 bytes to the KV port: core {before:.0f} -> {after:.0f} MiB")
    return after - before < MOST_MIB


def _false_leases() -> bool:
    """Sends requests with false leases, twelve at a time, next to true ones."""
    first_port, second_port = free_ports(2)
    with (
        attacked_server(*_transfer("kv_producer", first_port)) as first,
        attacked_server(*_transfer("kv_consumer", second_port)) as second,
    ):
        stop = threading.Event()

        def ask(server: Server, text: str, params: dict[str, Any] | None) -> Any:
            body = {"prompt": text, "max_tokens": 1, "kv_transfer_params": params}
            return httpx.post(server.url + "/v1/completions", json=body, timeout=120).json()

        def pair_s(name: str) -> float:
            params = ask(first, name + TEXT, {"do_remote_decode": True})["kv_transfer_params"]
            began = time.monotonic()
            ask(second, name + TEXT, params)
            return time.monotonic() - began

        def flood(number: int) -> None:
            false = {
                "do_remote_prefill": True,
                "remote_host": "127.0.0.1",
                "remote_port": first_port,
                "remote_num_tokens": 300,
                "remote_request_id": f"{number:032x}",
            }
            while not stop.is_set():
                ask(second, f"{number} {time.monotonic()} {TEXT[:1200]}", false)

        alone = max(pair_s(f"a{number} ") for number in range(4))
        threads = [threading.Thread(target=flood, args=(number,), daemon=True) for number in range(12)]
        for thread in threads:
            thread.start()
        time.sleep(3)
        beside = max(pair_s(f"b{number} ") for number in range(4))
        stop.set()
        for thread in threads:
            thread.join()
    print(f"12 false leases at a time: a true one takes {alone:.2f} s alone, {beside:.2f} s beside")
    return beside < alone + 2


def _told_prompts() -> bool:
    """Requests log-probabilities of many prompts, and measures the API server's peak memory."""
    with attacked_server() as server:
        before = resident_mib(server.process.pid)
        body = {"prompt": [[5] * 3900] * 40, "max_tokens": 1, "prompt_logprobs": 20}
        began = time.monotonic()
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=600)
        took_s = time.monotonic() - began
        most = resident_mib(server.process.pid, highest=True)
    print(
        f"prompt_logprobs of 40 prompts of 3,900 tokens: {answer.status_code} after {took_s:.1f} s, "
        f"API server {before:.0f} -> {most:.0f} MiB"
    )
    return most - before < 4 * MOST_MIB


@contextmanager
def _route(page: bytes) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """The address of a route to one stand-in server, and functions that start and stop that server."""
    own, behind = free_ports(2)

    class Backend(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = page if self.path == "/metrics" else b""
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    running: list[http.server.ThreadingHTTPServer] = []

    def start() -> None:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", behind), Backend)
        running.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def stop() -> None:
        server = running.pop()
        server.shutdown()
        server.server_close()

    start()
    command = [
        sys.executable,
        "-m",
        "continuum.cli",
        "route",
        f"http://127.0.0.1:{behind}",
        "--port",
        str(own),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{own}", start, stop
    finally:
        process.kill()
        process.wait()
        while running:
            stop()


def _becomes(url: str, status: int) -> bool:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if httpx.get(url + "/health", timeout=5).status_code == status:
                return True
        time.sleep(0.1)
    return False


def _route_that_watches() -> bool:
    """The server's metrics contain NaN; then the server stops, and returns."""
    with _route(b"vllm:num_requests_running NaN\n") as (url, start, stop):
        up = _becomes(url, 200)
        time.sleep(3)
        stop()
        down = _becomes(url, 503)
        start()
        again = _becomes(url, 200)
    print(f"route, NaN in /metrics: up {up}, told as down {down}, back {again}")
    return up and down and again


def _route_that_reads() -> bool:
    """Sends 60 MB of small messages, and very deep JSON, while another client requests /health."""
    with _route(b"") as (url, _, _):
        _becomes(url, 200)
        worst = 0.0
        stop = threading.Event()

        def watch() -> None:
            nonlocal worst
            while not stop.is_set():
                began = time.monotonic()
                httpx.get(url + "/health", timeout=120)
                worst = max(worst, time.monotonic() - began)
                time.sleep(0.02)

        thread = threading.Thread(target=watch)
        thread.start()
        message = b'{"role":"user","content":"x"}'
        bodies = (b"[" * 100_000, b'{"messages":[' + b",".join([message] * 2_000_000) + b"]}")
        codes = [_status(url, body) for body in bodies]
        stop.set()
        thread.join()
    print(f"route, deep JSON and 60 MB of messages: {codes}, /health waits {worst:.2f} s at most")
    return worst < 1.0 and 500 not in codes


def _status(url: str, body: bytes) -> int | None:
    try:
        return httpx.post(
            url + "/v1/chat/completions",
            content=body,
            headers={"content-type": "application/json"},
            timeout=120,
        ).status_code
    except httpx.HTTPError:
        return None


if __name__ == "__main__":
    sys.exit(main())
