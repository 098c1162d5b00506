"""Untrusted grammars: some small ones would take minutes or gigabytes to compile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from engine.structured_output.validator import TIME_LIMIT_S
from tests.api.server import Server, running_server

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
    """One that eats time, one that eats memory: each is a 400 with its field, and a plain request does not
    wait meanwhile. Asked for again it is refused at once, and the next good one is taken."""
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
