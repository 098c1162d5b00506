"""Sends every field of every body with every odd value, one at a time: ``python -m
tests.reliability.fields``."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.api.test_numbers import HOLE, ODD_NUMBERS, with_a_hole
from tests.reliability.attacked import MANY_TOKENS, attacked_server, is_long, resident_mib, shown
from tests.reliability.bodies import SHORT_ANSWERS, SLOW_S

ODD_TEXTS = ("", "x", "\x00", "a" * 20_000, "\U0010ffff" * 20, "[", "(a+)+$", "{% raw %}", "required", "none")
ODD_SHAPES: tuple[Any, ...] = (
    *([], {}, [None], [0], [""], [[]], [{}], {"": None}, {"a": 1}, {"type": "x"}, {"id": "x"}, {"name": "x"}),
    *(
        ["x"] * 300,
        [0] * 5000,
        {str(number): number for number in range(300)},
        {"type": "object", "$ref": "#"},
    ),
)
ODD_VALUES = (
    *ODD_NUMBERS,
    *map(json.dumps, (None, False, *ODD_TEXTS, *ODD_SHAPES)),
    *('"\\ud800"', "[" * 200 + "]" * 200, '{"a":' * 50_000 + "1" + "}" * 50_000),
)


def main() -> int:
    """Returns 1 if any answer was a server error or was lost."""
    with attacked_server(*SHORT_ANSWERS) as server:
        document = httpx.get(f"{server.url}/openapi.json").json()
        bodies = [
            (path, text.replace(f'"{HOLE}"', value))
            for path, text in sorted(with_a_hole(document))
            for value in ODD_VALUES
        ]
        statuses: Counter[int] = Counter()
        seconds: list[float] = []

        def ask(body: tuple[str, str]) -> None:
            started = time.monotonic()
            content = body[1].encode("utf-8", "surrogatepass")
            try:
                headers = {"Content-Type": "application/json"}
                path = body[0].replace("{job_id}", "job")
                answer = http.post(path, content=content, headers=headers)
                status, served_long = answer.status_code, is_long(answer.content)
            except httpx.HTTPError:
                status, served_long = 0, False
            if status == 0 or status >= 500:
                print(status, body[0], body[1][:150])
            statuses[status] += 1
            if served_long:
                return
            seconds.append(time.monotonic() - started)
            if seconds[-1] > SLOW_S:
                print(f"{seconds[-1]:.1f} s, {status}: {body[0]} {body[1][:150]}")

        pids = (server.process.pid, server.core_pid())
        with httpx.Client(base_url=server.url, timeout=60) as http, ThreadPoolExecutor(4) as clients:
            list(clients.map(ask, bodies[: len(bodies) // 4]))
            before = [resident_mib(pid) for pid in pids]
            list(clients.map(ask, bodies[len(bodies) // 4 :]))
        after = [resident_mib(pid) for pid in pids]
        bad = sum(count for status, count in statuses.items() if status == 0 or status >= 500)
        slow = sum(each > SLOW_S for each in seconds)
        print(
            f"fields: {len(bodies)} bodies, by status {dict(sorted(statuses.items()))}, {bad} 5xx or lost; "
            f"but for answers of over {MANY_TOKENS} tokens {shown(seconds)}, {slow} over {SLOW_S:g} s; "
            f"memory after a quarter and after all, front end "
            f"{before[0]:.0f} -> {after[0]:.0f}, core {before[1]:.0f} -> {after[1]:.0f} MiB"
        )
        return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
