"""``service_tier``: OpenAI's tiers are priorities; the response names the one that was served."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.server import running_server
from tracing.events import RequestArrived
from tracing.reader import read_trace

MESSAGES: list[Any] = [{"role": "user", "content": "Count."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Count.", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "Count.", "max_output_tokens": 16},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "served"),
    [
        ({"service_tier": "flex"}, "flex"),
        ({"service_tier": "priority"}, "priority"),
        ({"service_tier": "auto"}, "default"),
        ({"service_tier": "flex", "priority": 3}, "default"),
    ],
)
def test_the_response_names_the_tier(
    http: httpx.Client, path: str, fields: dict[str, Any], served: str
) -> None:
    """A ``priority`` of the client's own replaces the tier's."""
    answer = http.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["service_tier"] == served


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("priority", [2**53 + 1, -(2**63)])
def test_a_priority_that_no_trace_can_tell_is_refused(http: httpx.Client, path: str, priority: int) -> None:
    """A trace with one such request would be read by nobody."""
    answer = http.post(path, json=BODIES[path] | {"priority": priority})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "priority"
    assert str(2**53) in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_tier_is_refused(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json=BODIES[path] | {"service_tier": "fastest"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "service_tier"


def test_streams_name_it_too(http: httpx.Client) -> None:
    """OpenAI's library reads it in each chunk; without the field, chunks have none."""
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none") as client:
        asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "stream": True}
        chunks = list(client.chat.completions.create(**asked, service_tier="flex"))
        assert {chunk.service_tier for chunk in chunks} == {"flex"}
        assert {chunk.service_tier for chunk in client.chat.completions.create(**asked)} == {None}


@pytest.mark.parametrize("policy", ["continuum", "fcfs"])
def test_tiers_are_priorities(policy: str, model: Path, tmp_path: Path) -> None:
    """The trace has them. ``fcfs`` makes no difference, and the responses say so."""
    trace = tmp_path / "trace.jsonl"
    flags = ("--num-gpu-blocks-override", "200", "--scheduling-policy", policy, "--trace", str(trace))
    tiers = ("flex", "default", "priority")
    with running_server(model, *flags) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        answers = [
            client.post("/v1/completions", json=BODIES["/v1/completions"] | {"service_tier": tier}).json()
            for tier in tiers
        ]
        assert server.interrupt() == 0
    arrivals = [event for event in read_trace(trace) if isinstance(event, RequestArrived)]
    assert [event.priority for event in arrivals] == [1, 0, -1]
    served = [answer["service_tier"] for answer in answers]
    assert served == (["default"] * 3 if policy == "fcfs" else list(tiers))


KEYS = """
[batch]
key = "key-of-batch"
service_tier = "flex"
[usual]
key = "key-of-usual"
service_tier = "default"
[paid]
key = "key-of-paid"
service_tier = "priority"
[free]
key = "key-of-free"
"""
ASKED: list[dict[str, Any]] = [
    {},
    {"service_tier": "auto"},
    {"service_tier": "priority"},
    {"service_tier": "default"},
    {"service_tier": "flex"},
    {"priority": -9},
    {"priority": 9},
]
PRIORITIES = {
    "batch": [1, 1, 1, 1, 1, 1, 9],
    "usual": [0, 0, 0, 0, 1, 0, 9],
    "paid": [-1, -1, -1, 0, 1, -1, 9],
    "free": [0, 0, -1, 0, 1, -9, 9],
}
TIERS = {1: "flex", 0: "default", -1: "priority"}


def test_a_key_has_a_best_tier(model: Path, tmp_path: Path) -> None:
    """It is that of requests that name none; a better one is not served, whatever API asks for it."""
    trace = tmp_path / "trace.jsonl"
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    flags = ("--num-gpu-blocks-override", "200", "--api-key-file", str(keys), "--trace", str(trace))
    with running_server(model, *flags) as server:
        for (name, priorities), (path, body) in product(PRIORITIES.items(), BODIES.items()):
            with httpx.Client(base_url=server.url, headers={"x-api-key": f"key-of-{name}"}) as client:
                answers = [client.post(path, json=body | fields, timeout=60).json() for fields in ASKED]
            for asked, answer, priority in zip(ASKED, answers, priorities, strict=True):
                told = TIERS[priority] if "service_tier" in asked else None
                assert answer.get("service_tier") == (told or ("default" if "responses" in path else None))
        assert server.interrupt() == 0
    arrivals = [event for event in read_trace(trace) if isinstance(event, RequestArrived)]
    expected = [priority for each in PRIORITIES.values() for _ in BODIES for priority in each]
    assert [event.priority for event in arrivals] == expected
