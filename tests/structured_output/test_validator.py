"""Untrusted grammars: some small ones would take minutes or gigabytes to compile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from engine.errors import EngineDeadError, RequestError, TryAgainError
from engine.records.structured_outputs import StructuredOutputsParams
from engine.structured_output.future_cache import FutureCache
from engine.structured_output.validator import TIME_LIMIT_S
from tests.api.server import Server, running_server
from tests.child_processes import children_of

pytestmark = pytest.mark.slow

MEMORY_EATER = "start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{number}}}/" for number in range(1, 25))
TIME_EATER = {
    "allOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{number}}}$"} for number in range(1, 30)]
}
WHOLE_S = 60.0


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[Server]:
    with running_server(model_folder, "--num-gpu-blocks-override", "200") as running:
        yield running


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=WHOLE_S) as client:
        yield client


def complete(http: httpx.Client, **fields: object) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": "x", "max_tokens": 8, **fields})


def test_grammars_that_take_too_much_are_refused(http: httpx.Client) -> None:
    """A grammar that takes too much time or memory is a 400 with its field, while plain requests go on. A
    second attempt is refused at once, and the next good grammar is accepted."""
    for wanted, field in (
        ({"json": TIME_EATER}, "structured_outputs.json"),
        ({"grammar": MEMORY_EATER}, "structured_outputs.grammar"),
    ):
        with ThreadPoolExecutor(1) as thread:
            refused = thread.submit(complete, http, structured_outputs=wanted)
            assert complete(http).status_code == 200
            assert "grammar" in wanted or not refused.done()
            answer = refused.result()
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field
        assert "too complex" in answer.json()["error"]["message"]
        started_s = time.monotonic()
        assert complete(http, structured_outputs=wanted).status_code == 400
        assert time.monotonic() - started_s < TIME_LIMIT_S
        good = complete(http, structured_outputs={"regex": "[0-9]{4}"})
        assert good.status_code == 200
        assert good.json()["choices"][0]["text"].isdigit()


def test_a_killed_process_is_no_verdict(server: Server, http: httpx.Client) -> None:
    """A validator killed from outside does not reject its grammar: the grammar is validated again."""
    good = {"regex": "[a-c]{5}"}
    assert complete(http, structured_outputs={"regex": "[0-9]{3}"}).status_code == 200
    for number in (1, 2):
        for pid in children_of(server.process.pid, "engine.structured_output.validator"):
            os.kill(pid, signal.SIGKILL)
        answer = complete(http, structured_outputs={"regex": good["regex"] + "x" * number})
        assert answer.status_code == 200, answer.text


def test_what_failed_by_the_way_is_tried_again() -> None:
    """Errors of a request are cached, other failures are not; running work is never dropped."""
    cache: FutureCache[int] = FutureCache(1, 1, "test")
    wanted = [StructuredOutputsParams(regex=text) for text in "abc"]
    failures: list[Exception] = [TryAgainError("later"), RequestError("wrong")]

    def fail() -> int:
        raise failures.pop(0)

    with pytest.raises(TryAgainError):
        cache.get(wanted[0], fail).result()
    for _ in range(2):
        with pytest.raises(RequestError):
            cache.get(wanted[0], fail).result()
    assert not failures
    go_on = threading.Event()
    pending = cache.get(wanted[1], lambda: int(go_on.wait(60)))
    others = [cache.get(wanted[2], lambda: 2, owner="other")]
    assert cache.get(wanted[1], lambda: 3) is pending
    go_on.set()
    assert [pending.result(), others[0].result()] == [1, 2]


def test_owners_of_grammars_take_turns() -> None:
    """The second owner's only grammar follows at most two of the first owner's ten."""
    cache: FutureCache[int] = FutureCache(64, 1, "test")
    go_on = threading.Event()
    order: list[str] = []

    def made(name: str) -> int:
        go_on.wait(60)
        order.append(name)
        return 0

    asked = [
        cache.get(StructuredOutputsParams(regex=f"a{number}"), lambda: made("many"), "many")
        for number in range(10)
    ]
    asked.append(cache.get(StructuredOutputsParams(regex="b"), lambda: made("one"), "one"))
    go_on.set()
    for future in asked:
        future.result()
    assert order.index("one") <= 2


def test_nobody_waits_for_a_cache_that_is_closed() -> None:
    """Closing the cache fails all futures, of earlier and of later requests."""
    cache: FutureCache[int] = FutureCache(64, 1, "test")
    end = threading.Event()
    asked = [
        cache.get(StructuredOutputsParams(regex=text), lambda: int(end.wait(60)), text) for text in "abc"
    ]
    cache.close()
    asked.append(cache.get(StructuredOutputsParams(regex="d"), lambda: 1))
    for future in asked:
        with pytest.raises(EngineDeadError):
            future.result(10)
    end.set()
