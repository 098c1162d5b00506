"""Promises about numbers in any body: each is checked before anything is sized by it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from tests.api.server import Server

pytestmark = pytest.mark.timeout(300)

ODD_NUMBERS = (
    *("-1", "0", "-0.0", "129", "1000000000", "2147483648", "4294967296", "9007199254740993"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809", "18446744073709551616"),
    *(
        "1" + "0" * 400,
        "5e-324",
        "1e308",
        "-1e308",
        "1e400",
        "NaN",
        "-Infinity",
        "true",
        '"7"',
        '"' + "9" * 30 + '"',
    ),
)
"""Numbers as written in a body; some are not JSON."""

SHORT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1,
        "logprobs": True,
    },
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions/render": {"prompt": "hi"},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 1}},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1, "store": False},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/conversations": {},
    "/v1/conversations/{conversation_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}/items": {"items": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/trace": {"enabled": False},
    "/v1/jobs/{job_id}/signals": {"state": "started"},
}
"""For each endpoint a body that is served quickly."""
BEYOND = ("best_of", "prompt_logprobs", "truncate_prompt_tokens", "dimensions", "top_n_tokens", "n")
"""Numbers of other servers or other APIs."""
HOLE = "the odd number"
MEDIAN_S = 0.1
SLOWEST_S = 5.0
"""The slowest alone takes a twentieth of it, which allows for a busy machine."""
MAX_GROWTH_KIB = 64 * 1024


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/openapi.json").json())


@pytest.mark.slow
def test_every_number_of_every_body_is_refused_or_served_at_once(
    server: Server, document: dict[str, Any]
) -> None:
    """No number causes a 5xx, a wait, or memory that stays allocated."""
    bodies = [
        (path, text.replace(f'"{HOLE}"', number))
        for path, text in sorted(with_a_hole(document))
        for number in ODD_NUMBERS
    ]
    assert len(bodies) > 1500
    seconds: list[float] = []

    with httpx.Client(base_url=server.url, timeout=60) as http:

        def ask(body: tuple[str, str]) -> int:
            started = time.monotonic()
            answer = http.post(
                re.sub("{.*?}", "conv_1", body[0]),
                content=body[1],
                headers={"Content-Type": "application/json"},
            )
            seconds.append(time.monotonic() - started)
            return answer.status_code

        with ThreadPoolExecutor(2) as clients:
            before = _resident_kib(server)
            statuses = list(clients.map(ask, bodies))
            after = _resident_kib(server)

    faulty = [pair for pair in zip(statuses, bodies, strict=True) if pair[0] not in (200, 400, 404)]
    assert faulty == []
    assert median(seconds) < MEDIAN_S
    assert max(seconds) < SLOWEST_S
    assert [b - a for a, b in zip(before, after, strict=True) if b - a > MAX_GROWTH_KIB] == []


@pytest.mark.parametrize("number", [129, 10**9, 2**63 - 1])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_many_answers_are_refused_before_anything_is_made_for_them(
    http: httpx.Client, path: str, stream: bool, number: int
) -> None:
    """Too large an ``n`` is refused at once: its readers would use all memory, also next to another
    request."""
    answer = http.post(path, json={**SHORT[path], "n": number, "stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"


@pytest.mark.parametrize("text", ["0", "-1", "1001", "9" * 5000, "1e3", "0x10", "", " 7", "٣", "1_0", "nan"])
def test_numbers_of_the_query_are_refused_too(http: httpx.Client, text: str) -> None:
    """A number in the query is a few digits, or an error names it."""
    answer = http.get("/v1/jobs", params={"limit": text})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "limit"


@pytest.mark.parametrize("bias", [1e308, -1e308, 101.0])
def test_a_huge_bias_means_the_largest(http: httpx.Client, bias: float) -> None:
    """Biases beyond 100 count as 100; in 32 bits they would be infinite, and no token could be sampled."""
    body = {**SHORT["/v1/completions"], "seed": 1, "temperature": 1.0, "top_p": 0.5, "return_token_ids": True}
    given, largest = (
        http.post("/v1/completions", json={**body, "logit_bias": {"7": value}}).json()["choices"][0]
        for value in (bias, 100.0 if bias > 0 else -100.0)
    )
    assert given["token_ids"] == largest["token_ids"]


def with_a_hole(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields each path with its body, with a placeholder for one number."""
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema")
        if schema is None or path not in SHORT:  # Operators' bodies have no numbers.
            continue
        places = set(_numbers(schema, document["components"]["schemas"]))
        for place in {*places, *((name,) for name in (*schema["properties"], *BEYOND))}:
            if (path, *place) != ("/v1/messages", "max_tokens"):  # Any number there is served to its end.
                yield path, json.dumps(_filled(SHORT[path], place))


def _numbers(schema: Any, shared: dict[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields where numbers are: names of fields, ``[]`` for an item of a list, ``{}`` for a value of a
    map."""
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        schema = shared[schema["$ref"].rpartition("/")[2]]
    if schema.get("type") in ("integer", "number"):
        yield place
    for other in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _numbers(other, shared, place)
    for name, inner in schema.get("properties", {}).items():
        yield from _numbers(inner, shared, (*place, name))
    yield from _numbers(schema.get("items"), shared, (*place, "[]"))
    yield from _numbers(schema.get("additionalProperties"), shared, (*place, "{}"))


def _filled(body: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    """The body with a placeholder at this place, and the containers on the path to it."""
    value: Any = HOLE
    for name in reversed(place[1:]):
        value = [value] if name == "[]" else {"7": value} if name == "{}" else {name: value}
    if place[0] == "thinking":
        value = {"type": "enabled", **value} if isinstance(value, dict) else value
    return {**deepcopy(body), place[0]: value}


def _resident_kib(server: Server) -> list[int]:
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in (server.process.pid, server.core_pid())]
    return [int(text.split("VmRSS:")[1].split()[0]) for text in texts]
