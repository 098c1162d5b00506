"""Sends a single request that costs much, with few bytes or many: ``python -m tests.reliability.costly
[MB]``.

Prints how long other clients wait, and how much memory it takes.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.reliability.attacked import Probe, attacked_server, resident_mib, shown

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
PATIENCE_S = 60.0
FEW_BYTES = [
    (path, n) for path in ("/v1/chat/completions", "/v1/completions") for n in (129, 3_000_000, 2**63 - 1)
]
MEGABYTES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/tokenize": lambda text: {"prompt": text},
    "/v1/messages/count_tokens": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses/input_tokens": lambda text: {"input": text},
}


def main(megabytes: float = 2.0) -> None:
    """Each attack gets a new server, because a server seldom returns the memory that an attack takes."""
    for path, n in FEW_BYTES:
        body = {"prompt": "x", "max_tokens": 1} if path == "/v1/completions" else CHAT
        _attack(f"n={n} to {path}", path, [json.dumps({**body, "n": n}).encode()])
    text = "ab " * int(megabytes * 1e6 / 3)
    for path, make in MEGABYTES.items():
        _attack(f"two of {megabytes:g} MB to {path}", path, [json.dumps(make(text)).encode()] * 2)
    bomb = gzip.compress(b'{"a": "' + b"a" * 200_000_000 + b'"}', 1)
    _attack("200 MB in gzip to /v1/chat/completions", "/v1/chat/completions", [bomb], "gzip")


def _attack(name: str, path: str, bodies: list[bytes], encoding: str = "identity") -> None:
    with attacked_server() as server:
        pid = server.process.pid
        before = resident_mib(pid)

        def ask(body: bytes) -> str:
            headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
            try:
                answer = httpx.post(server.url + path, content=body, headers=headers, timeout=PATIENCE_S)
                return str(answer.status_code)
            except httpx.HTTPError as error:
                return type(error).__name__

        started = time.monotonic()
        with Probe(server.url, timeout_s=PATIENCE_S) as probe, ThreadPoolExecutor(len(bodies)) as clients:
            answers = list(clients.map(ask, bodies))
        took = time.monotonic() - started
        peak = resident_mib(pid, highest=True) if server.process.poll() is None else float("nan")
        print(
            f"costly: {name}: {answers} after {took:.2f} s; /health {shown(probe.seconds)}; front end "
            f"{before:.0f} -> {peak:.0f} MiB at most",
            flush=True,
        )


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
