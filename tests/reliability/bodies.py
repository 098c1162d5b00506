"""Sends mutated bodies to every endpoint: ``python -m tests.reliability.bodies [NUMBER] [SEED]``."""

from __future__ import annotations

import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.api.malformed_bodies import MalformedBody, malformed_bodies
from tests.reliability.attacked import MANY_TOKENS, attacked_server, is_long, resident_mib, shown

NUM_CLIENTS = 6
SLOW_S = 2.0
SHORT_ANSWERS = ("--max-model-len", "640")
"""Bounds answers to seconds, also where a body sets no limit."""


def main(number: int = 12_000, seed: int = 1) -> int:
    """Returns 1 if any answer was a server error or was lost."""
    with attacked_server(*SHORT_ANSWERS) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        statuses: Counter[int] = Counter()
        seconds: list[float] = []

        def ask(body: MalformedBody) -> None:
            started = time.monotonic()
            headers = {"Content-Type": body.content_type}
            try:
                path = body.path.replace("{job_id}", "job")
                answer = http.post(path, content=body.body, headers=headers)
                status, served_long = answer.status_code, is_long(answer.content)
            except httpx.HTTPError as error:
                status, served_long = 0, False
                print("lost", body.path, body.change, repr(error))
            if status >= 500:
                print(status, body.path, body.change)
            statuses[status] += 1
            if served_long:
                return
            seconds.append(time.monotonic() - started)
            if seconds[-1] > SLOW_S:
                print(f"{seconds[-1]:.1f} s, {status}: {body.path} {body.change}")

        bodies = list(malformed_bodies(number, seed))
        pids = (server.process.pid, server.core_pid())
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            list(clients.map(ask, bodies[: number // 4]))
            before = [resident_mib(pid) for pid in pids]
            list(clients.map(ask, bodies[number // 4 :]))
        after = [resident_mib(pid) for pid in pids]
        bad = sum(count for status, count in statuses.items() if status == 0 or status >= 500)
        slow = sum(each > SLOW_S for each in seconds)
        print(
            f"bodies: {number} mutated, by status {dict(sorted(statuses.items()))}, {bad} 5xx or lost; "
            f"but for answers of over {MANY_TOKENS} tokens {shown(seconds)}, {slow} over {SLOW_S:g} s; "
            f"memory after a quarter and after all, front end "
            f"{before[0]:.0f} -> {after[0]:.0f}, core {before[1]:.0f} -> {after[1]:.0f} MiB"
        )
        return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
