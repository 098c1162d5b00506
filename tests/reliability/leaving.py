"""Clients that vanish, or close only one direction: ``python -m tests.reliability.leaving [SECONDS]``."""

from __future__ import annotations

import random
import socket
import struct
import sys
import time
from contextlib import suppress

import httpx

from tests.api.wire import connect, post
from tests.reliability.attacked import Probe, attacked_server, shown

RESET = struct.pack("ii", 1, 0)
NUM_AT_ONCE = 25


def main(seconds: float = 10.0) -> None:
    """Prints a normal client's latency, and how many requests of vanished clients are left."""
    with attacked_server() as server:
        with Probe(server.url) as alone:
            time.sleep(2)
        with Probe(server.url) as beside:
            vanished = _storm(server.url, seconds)
        started = time.monotonic()
        while _in_hand(server.url) and time.monotonic() - started < 60:
            time.sleep(0.05)
        left, took = _in_hand(server.url), time.monotonic() - started
        print(
            f"leaving: {vanished} clients vanished in {seconds:.0f} s; /health alone {shown(alone.seconds)}, "
            f"beside {shown(beside.seconds)}; {left} requests in hand after {took:.1f} s"
        )
        print(f"leaving: {_half_closed(server.url, 60)} of 60 that closed only their sending side got all")


def _body(number: int, max_tokens: int, stream: bool) -> bytes:
    words = " ".join(f"w{(number * 31 + index) % 997}" for index in range(60))
    return post(
        "/v1/completions",
        {"prompt": words, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream},
    )


def _storm(url: str, seconds: float) -> int:
    chance = random.Random(3)
    deadline, vanished = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        connections = [connect(url) for _ in range(NUM_AT_ONCE)]
        for connection in connections:
            connection.sendall(_body(chance.randrange(10**6), 2000, chance.random() < 0.7))
        time.sleep(chance.choice([0.0, 0.02, 0.2, 0.6]))
        for connection in connections:
            if chance.random() < 0.4:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.close()
        vanished += NUM_AT_ONCE
    return vanished


def _in_hand(url: str) -> int:
    return int(httpx.get(f"{url}/load", timeout=60).json()["server_load"])


def _half_closed(url: str, number: int) -> int:
    connections = [connect(url) for _ in range(number)]
    for index, connection in enumerate(connections):
        connection.sendall(_body(index, 30, stream=True))
        connection.shutdown(socket.SHUT_WR)
    num_whole = 0
    for connection in connections:
        data = b""
        with suppress(OSError):
            while piece := connection.recv(65536):
                data += piece
        num_whole += b"[DONE]" in data
        connection.close()
    return num_whole


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
