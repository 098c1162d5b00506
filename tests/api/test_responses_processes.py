"""Promises of /v1/responses with several API server processes, and at the limit of stored responses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.server import Server, running_server

ENDLESS = {"input": "hello", "ignore_eos": True, "min_tokens": 900}
MAX_STORED = 5


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    flags = ("--num-gpu-blocks-override", "400", "--api-server-count", "2", "--shutdown-grace-s", "0.1")
    bounds = ("--max-stored-responses", str(MAX_STORED), "--max-background-responses", "1")
    impatient = ("--sse-keep-alive-interval", "0.001")
    with running_server(model, *flags, *bounds, *impatient) as running:
        yield running


@pytest.fixture(scope="module")
def processes(server: Server) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """One connection to each of the two API server processes."""
    with ExitStack() as clients:
        found: dict[int, httpx.Client] = {}
        for _ in range(200):
            client = clients.enter_context(httpx.Client(base_url=server.url, timeout=60))
            found.setdefault(client.get("/load").json()["process_id"], client)
            if len(found) == 2:
                one, other = found.values()
                yield one, other
                return
        raise AssertionError("all connections went to one process")


def post(client: httpx.Client, **body: Any) -> dict[str, Any]:
    return accepted(client.post("/v1/responses", json={"max_output_tokens": 3, **body}))


def post_when_free(client: httpx.Client, **body: Any) -> dict[str, Any]:
    """Retries while the server answers 503, as the previous request may just be ending."""
    deadline = time.monotonic() + 60
    while (answer := client.post("/v1/responses", json=body)).status_code == 503:
        assert time.monotonic() < deadline
    return accepted(answer)


def accepted(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def until_ended(client: httpx.Client, response_id: str) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        status: str = client.get(f"/v1/responses/{response_id}").json()["status"]
        if status not in ("queued", "in_progress"):
            return status
    raise AssertionError("the response did not end")


def test_a_job_may_change_the_process(processes: tuple[httpx.Client, httpx.Client]) -> None:
    """A turn continues a response that another process made, in its job and with its cache."""
    one, other = processes
    first = post(one, input="Once upon a time there was a machine. " * 4, ignore_eos=True)
    second = post(other, input="And then?", previous_response_id=first["id"])
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > first["usage"]["total_tokens"] - 32
    jobs = [response["usage"]["receipt"]["job_id"] for response in (first, second)]
    assert jobs[0] == jobs[1]
    assert other.get(f"/v1/responses/{first['id']}").json() == first


def test_the_bound_holds_for_all_processes(processes: tuple[httpx.Client, httpx.Client]) -> None:
    """At the limit the least recently used responses are deleted, whichever process made them."""
    one, other = processes
    made = [post(client, input="hello")["id"] for client in (one, other) for _ in range(MAX_STORED)]
    kept = [one.get(f"/v1/responses/{response_id}").status_code for response_id in made]
    assert kept == [404] * MAX_STORED + [200] * MAX_STORED


@pytest.mark.slow
def test_a_run_does_not_make_room(processes: tuple[httpx.Client, httpx.Client]) -> None:
    """A running response is never deleted to free space, however many others are stored meanwhile."""
    one, other = processes
    run = post(one, **{**ENDLESS, "background": True, "max_output_tokens": None})
    made = [post(other, input="hello", max_output_tokens=1)["id"] for _ in range(MAX_STORED + 2)]
    found = other.get(f"/v1/responses/{run['id']}")
    assert found.status_code == 200, found.text
    assert [one.get(f"/v1/responses/{each}").status_code for each in made] == [404] * 2 + [200] * MAX_STORED
    assert until_ended(one, run["id"]) == "incomplete"


def begin_conversation(client: httpx.Client) -> str:
    conversation: str = client.post("/v1/conversations", json={}).json()["id"]
    return conversation


def assert_locked(answer: httpx.Response) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("conversation", "conversation_locked")
    assert "retry" in error["message"]


def test_a_conversation_has_one_turn_at_a_time(processes: tuple[httpx.Client, httpx.Client]) -> None:
    """While a turn runs, every process refuses another one, as OpenAI does: both would continue the same
    turn, and one would be lost. Once a turn has ended, the next turn contains it."""
    one, other = processes
    conversation = begin_conversation(one)
    half = {**ENDLESS, "min_tokens": 0, "max_output_tokens": 400}
    run = post(one, **{**half, "input": "ONE", "background": True, "conversation": conversation})
    refused = {"input": "TWO", "conversation": conversation, "max_output_tokens": 3}
    for client in processes:
        assert_locked(client.post("/v1/responses", json=refused))
        assert client.post("/v1/responses/input_tokens", json=refused).status_code == 200
    post(other, input="another", conversation=begin_conversation(other))
    assert until_ended(other, run["id"]) == "incomplete"
    last = post(other, input="THREE", conversation=conversation)
    items = other.get(f"/v1/responses/{last['id']}/input_items?order=asc").json()["data"]
    assert [item["content"][0]["text"] for item in items if item["role"] == "user"] == ["ONE", "THREE"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "ending",
    [{}, {"input": "word " * 50_000}, {"tool_choice": "required"}],
    ids=["ended", "failed", "refused"],
)
def test_a_conversation_is_free_when_its_turn_ended(
    processes: tuple[httpx.Client, httpx.Client], ending: dict[str, Any], streams: bool
) -> None:
    """A client that has read the end of an answer may send the next turn at once, to either process."""
    one, other = processes
    body = {"conversation": begin_conversation(one), "input": "hello", "max_output_tokens": 3}
    one.post("/v1/responses", json={**body, "stream": streams, **ending})
    post(other, **body)


@pytest.mark.slow
def test_a_conversation_is_free_when_its_run_was_ended(
    processes: tuple[httpx.Client, httpx.Client],
) -> None:
    """The lock ends with a background turn that was cancelled, deleted or refused."""
    one, other = processes
    cancelled, deleted, refused = (begin_conversation(one) for _ in range(3))
    run = post_when_free(one, **ENDLESS, conversation=cancelled, background=True)
    assert one.post(f"/v1/responses/{run['id']}/cancel").json()["status"] == "cancelled"
    post(other, input="next", conversation=cancelled)
    run = post_when_free(one, **ENDLESS, conversation=deleted, background=True)
    full = one.post("/v1/responses", json={"input": "x", "conversation": refused, "background": True})
    assert full.status_code == 503
    post(other, input="next", conversation=refused)
    assert one.delete(f"/v1/responses/{run['id']}").json()["deleted"]
    post_when_unlocked(other, input="next", conversation=deleted, max_output_tokens=3)


def test_a_conversation_is_free_when_its_client_left(processes: tuple[httpx.Client, httpx.Client]) -> None:
    """When a stream's client disconnects, its turn ends, and the next turn begins where that one began."""
    one, other = processes
    body = {**ENDLESS, "conversation": begin_conversation(one)}
    with one.stream("POST", "/v1/responses", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # Closing it closes the connection.
        assert "event: response.created" in lines
        assert_locked(other.post("/v1/responses", json=body))
    post_when_unlocked(other, **{**body, "input": "next", "min_tokens": 0, "max_output_tokens": 3})


def post_when_unlocked(client: httpx.Client, **body: Any) -> None:
    deadline = time.monotonic() + 60
    while (answer := client.post("/v1/responses", json=body)).status_code == 400:
        assert_locked(answer)
        assert time.monotonic() < deadline
    assert answer.status_code == 200, answer.text


def test_a_run_of_another_process_can_be_cancelled(processes: tuple[httpx.Client, httpx.Client]) -> None:
    """The cancel request is answered once the run has ended in its process."""
    one, other = processes
    run = post(one, **{**ENDLESS, "background": True, "max_output_tokens": None})
    assert other.post(f"/v1/responses/{run['id']}/cancel").json()["status"] in ("cancelled", "incomplete")
    assert one.get("/load").json()["server_load"] == 0


def test_background_responses_are_bounded(processes: tuple[httpx.Client, httpx.Client]) -> None:
    """One response too many gets 503 with a retry time; when one has ended, another is accepted."""
    one, _ = processes
    run = post(one, **{**ENDLESS, "background": True, "max_output_tokens": None})
    refused = one.post("/v1/responses", json={"input": "hello", "background": True})
    assert refused.status_code == 503, refused.text
    assert "background" in refused.json()["error"]["message"]
    assert int(refused.headers["Retry-After"]) >= 1
    one.post(f"/v1/responses/{run['id']}/cancel")
    assert until_ended(one, post(one, input="hello", background=True)["id"]) == "incomplete"


@pytest.mark.slow
def test_a_deleted_run_ends(processes: tuple[httpx.Client, httpx.Client]) -> None:
    """Deleting a background response stops it at any stage, and it is not stored again."""
    one, other = processes
    for deleting in (one, other) * 2:
        run = post_when_free(one, **{**ENDLESS, "background": True, "max_output_tokens": None})
        assert deleting.delete(f"/v1/responses/{run['id']}").json()["deleted"]
        deadline = time.monotonic() + 60
        while one.get("/load").json()["server_load"]:
            assert time.monotonic() < deadline
        assert one.get(f"/v1/responses/{run['id']}").status_code == 404


def test_items_of_a_conversation_are_everybodys(processes: tuple[httpx.Client, httpx.Client]) -> None:
    """One process adds items, another deletes one; the conversation continues from the rest."""
    one, other = processes
    first, second = ({"type": "message", "role": "user", "content": text} for text in ("one", "two"))
    path = f"/v1/conversations/{one.post('/v1/conversations', json={'items': [first]}).json()['id']}"
    added = other.post(f"{path}/items", json={"items": [second]}).json()
    [newest, oldest] = one.get(f"{path}/items").json()["data"]
    assert newest == added["data"][0]
    assert one.delete(f"{path}/items/{oldest['id']}").status_code == 200
    assert other.get(f"{path}/items").json()["data"] == [newest]
    third = one.post(f"{path}/items", json={"items": [first]}).json()["data"]
    assert other.get(f"{path}/items?order=asc").json()["data"] == [newest, *third]


def test_a_late_refusal_is_told_in_the_stream(processes: tuple[httpx.Client, httpx.Client]) -> None:
    """A stream that began early, to avoid silence, sends the response's id before the error. (The input is
    short enough to be tokenized.)"""
    body = {"input": "word " * 4_000, "stream": True}
    with processes[0].stream("POST", "/v1/responses", json=body) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    events = [event for event in events if event["type"] != "response.in_progress"]  # kept alive, if slow
    created, error, failed = events
    assert [created["type"], error["type"], failed["type"]] == [
        "response.created",
        "error",
        "response.failed",
    ]
    assert error["code"] == failed["response"]["error"]["code"] == "context_length_exceeded"
    assert created["response"]["id"] == failed["response"]["id"]


def test_a_stream_that_breaks_says_so(server: Server, processes: tuple[httpx.Client, httpx.Client]) -> None:
    """A stopping server ends its streams with an error event and response.failed. (Must be the last test
    here.)"""
    body = {**ENDLESS, "stream": True}
    events: list[dict[str, Any]] = []
    with processes[0].stream("POST", "/v1/responses", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == 6:
                assert server.interrupt() == 0
    *_, error, failed = events
    assert error["type"] == "error"
    assert error["message"] == failed["response"]["error"]["message"]
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert "shutting down" in error["message"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
