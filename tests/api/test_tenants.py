"""Promises to owners of different keys: none can find, read, end or infer what another one has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from engine.api.app import ROUTERS
from engine.api.dashboard import endpoints as dashboard
from tests.api.malformed_bodies import POOLING_BODIES
from tests.api.server import Server, running_server

ALICE, BOB, OPERATOR = "sk-alice", "sk-bob", "sk-operator"
SECRET = "alice's account 42"
LONG = "the ledger says one thing and the account another " * 12
CHAT, RESPONSES, CONVERSATIONS = "/v1/chat/completions", "/v1/responses", "/v1/conversations"

FOR_OPERATORS = {
    "/v1/capacity",
    "/load",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/pause",
    "/resume",
    "/is_paused",
    "/engines",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/drain",
    "/trace",
    "/dashboard/feed",
    "/dashboard/jobs/{job_id:path}",
}
FOR_ALL = POOLING_BODIES.keys() | {
    "/",
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/completions/render",
    "/inference/v1/generate",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{name:path}",
    "/v1/responses",
    "/v1/responses/compact",
    "/v1/responses/input_tokens",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/responses/{response_id}/input_items",
    "/v1/conversations",
    "/v1/conversations/{conversation_id}",
    "/v1/conversations/{conversation_id}/items",
    "/v1/conversations/{conversation_id}/items/{item_id}",
    "/v1/usage",
    "/v1/jobs",
    "/v1/jobs/{job_id:path}",
    "/v1/jobs/{job_id:path}/finish",
    "/v1/jobs/{job_id:path}/tree",
    "/v1/jobs/{job_id:path}/signals",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ping",
    "/version",
    "/metrics",
    "/dashboard",
}

Clients = dict[str, httpx.Client]


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = [
        *("--num-gpu-blocks-override", "400"),
        *("--api-key", f"alice:{ALICE}", f"bob:{BOB}", OPERATOR),
        *("--trace-dir", str(tmp_path_factory.mktemp("traces"))),
    ]
    with running_server(model, *flags) as server:
        yield server
        assert server.interrupt() == 0


@pytest.fixture(scope="module")
def clients(running: Server) -> Iterator[Clients]:
    """One client per key."""
    keys = {"alice": ALICE, "bob": BOB, "operator": OPERATOR}
    opened = {
        name: httpx.Client(base_url=running.url, headers={"x-api-key": key}, timeout=30)
        for name, key in keys.items()
    }
    yield opened
    for client in opened.values():
        client.close()


@pytest.fixture
def alice(clients: Clients) -> httpx.Client:
    return clients["alice"]


@pytest.fixture
def bob(clients: Clients) -> httpx.Client:
    return clients["bob"]


@pytest.fixture
def operator(clients: Clients) -> httpx.Client:
    return clients["operator"]


def ask(client: httpx.Client, text: str, **more: Any) -> dict[str, Any]:
    """The usage of a chat with one message."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def respond(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post(RESPONSES, json={"input": SECRET, "max_output_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


# ---- responses and conversations ----


def test_a_response_is_its_owners(alice: httpx.Client, bob: httpx.Client, operator: httpx.Client) -> None:
    """Another owner who knows the id cannot read, continue, refer to, cancel or delete the response. Nor can
    an unnamed key, which opens server-wide paths only."""
    response = respond(alice)
    path = f"{RESPONSES}/{response['id']}"
    item = {"type": "item_reference", "id": response["output"][0]["id"]}
    for other in (bob, operator):
        for refused in (
            other.get(path),
            other.get(path, params={"stream": "true"}),
            other.get(f"{path}/input_items"),
            other.post(f"{path}/cancel"),
            other.delete(path),
            other.post(RESPONSES, json={"input": "a", "previous_response_id": response["id"]}),
            other.post(f"{RESPONSES}/input_tokens", json={"previous_response_id": response["id"]}),
            other.post(RESPONSES, json={"input": [item]}),
            other.get(f"{RESPONSES}/alice/{response['id']}"),
            other.get(f"{RESPONSES}/alice%2F{response['id']}"),
        ):
            assert refused.status_code == 404, refused.text
            assert SECRET not in refused.text
    assert SECRET in alice.get(f"{path}/input_items").text
    assert respond(alice, previous_response_id=response["id"])["status"] in ("completed", "incomplete")


def test_a_conversation_is_its_owners(alice: httpx.Client, bob: httpx.Client) -> None:
    """Another owner cannot read, extend, delete or lock the conversation."""
    begun = {"items": [{"type": "message", "role": "user", "content": SECRET}]}
    name = alice.post(CONVERSATIONS, json=begun).json()["id"]
    turn = respond(alice, conversation=name)
    items = f"{CONVERSATIONS}/{name}/items"
    item = alice.get(items).json()["data"][0]["id"]
    for refused in (
        bob.get(items),
        bob.post(items, json=begun),
        bob.get(f"{items}/{item}"),
        bob.delete(f"{items}/{item}"),
        bob.post(f"{CONVERSATIONS}/{name}", json={"metadata": {}}),
        bob.get(f"{CONVERSATIONS}/{name}"),
        bob.delete(f"{CONVERSATIONS}/{name}"),
        bob.post(RESPONSES, json={"input": "a", "conversation": name}),
        bob.get(f"{RESPONSES}/{turn['id']}"),
    ):
        assert refused.status_code == 404
    assert alice.get(f"{CONVERSATIONS}/{name}").status_code == 200


def test_a_background_run_is_its_owners(alice: httpx.Client, bob: httpx.Client) -> None:
    """Another owner cannot cancel the run or follow its events."""
    run = respond(alice, background=True, max_output_tokens=900, ignore_eos=True)
    path = f"{RESPONSES}/{run['id']}"
    assert bob.post(f"{path}/cancel").status_code == 404
    assert bob.get(path, params={"stream": "true"}).status_code == 404
    assert alice.get(path).json()["status"] in ("queued", "in_progress")
    assert alice.post(f"{path}/cancel").json()["status"] == "cancelled"


# ---- jobs ----


def test_no_id_leads_to_anothers_job(alice: httpx.Client, bob: httpx.Client, operator: httpx.Client) -> None:
    """Whether named by its owner, prefixed by the engine or inferred, a job id used by someone else means a
    separate job, and signals do not reach the owner's job."""
    named = ask(alice, LONG, job_id="main")["receipt"]["job_id"]
    inferred = ask(alice, LONG + "and more", user="bob")["receipt"]["job_id"]
    assert (named, inferred.startswith("alice:inferred-")) == ("alice:main", True)
    for job_id in (named, "main", inferred, inferred.removeprefix("alice:")):
        for other in (bob, operator):
            receipt = ask(other, LONG, job_id=job_id, is_last_step=True, user="alice")["receipt"]
            assert receipt["job_id"] not in (named, inferred)
            assert receipt["turn"] == 1
        assert bob.get(f"/v1/jobs/{job_id}").status_code == 404
        assert bob.get(f"/v1/jobs/{job_id}/tree").status_code == 404
        assert bob.post(f"/v1/jobs/{job_id}/finish").status_code == 404
        signal = {"state": "finished"}
        assert bob.post(f"/v1/jobs/{job_id}/signals", json=signal).status_code == 404
    for job_id in (named, inferred):
        assert alice.get(f"/v1/jobs/{job_id}").json()["turns"] == 1
    assert alice.get(f"/v1/jobs/{inferred.removeprefix('alice:')}").json()["id"] == inferred


def test_a_list_holds_ones_own(alice: httpx.Client, bob: httpx.Client, operator: httpx.Client) -> None:
    """A list has only the owner's jobs, however many others exist and whatever user is named; an operator
    sees all."""
    ask(alice, LONG, job_id="mine")
    for number in range(4):
        ask(bob, "short", job_id=f"his{number}")
    ask(operator, "short", job_id="for alice", user="alice")

    def listed(client: httpx.Client, limit: int = 100) -> list[str]:
        answer = client.get("/v1/jobs", params={"limit": limit})
        return [job["id"] for job in answer.json()["data"]]

    assert listed(alice, limit=1) == ["alice:mine"]
    assert all(job_id.startswith("alice:") for job_id in listed(alice))
    assert all(job_id.startswith("bob:") for job_id in listed(bob))
    assert {"alice:mine", "bob:his0", "for alice"} <= set(listed(operator))


def test_what_is_said_in_a_header_makes_no_owner(alice: httpx.Client, bob: httpx.Client) -> None:
    """Only the key decides the owner of a request."""
    response = respond(alice)
    for name in ("X-Continuum-Owner", "x-continuum-owner", "X-Continuum-Tenant"):
        headers = {name: "alice"}
        assert bob.get(f"{RESPONSES}/{response['id']}", headers=headers).status_code == 404
        assert bob.get("/load", headers={name: ""}).status_code == 403


def test_without_keys_nobody_is_an_owner(http: httpx.Client) -> None:
    """Without keys a header does not make an owner either."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "job_id": "unowned"}
    answer = http.post(CHAT, json=body, headers={"X-Continuum-Owner": "alice"}).json()
    assert answer["usage"]["receipt"]["job_id"] == "unowned"
    assert http.get("/load", headers={"X-Continuum-Owner": "alice"}).status_code == 200


# ---- server-wide paths ----


def test_what_concerns_everybody_takes_a_key_without_a_name(
    alice: httpx.Client, operator: httpx.Client
) -> None:
    """Each path is open to all or to operators only; an owner's key opens none of the latter."""
    paths = {
        (method, route.path)
        for router in (*ROUTERS, dashboard.router)
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }
    assert {path for _, path in paths} - FOR_ALL == FOR_OPERATORS
    for method, path in paths:
        if path in FOR_OPERATORS:
            refused = alice.request(method, path.replace("{job_id:path}", "alice:main"), json={})
            assert refused.status_code == 403, (method, path)
            assert refused.json()["error"]["type"] == "PermissionDeniedError"
    assert operator.post("/pause").status_code == operator.post("/resume").status_code == 200
    assert operator.get("/trace").json()["state"] == "off"


def test_nobody_learns_what_another_has_sent(alice: httpx.Client, bob: httpx.Client) -> None:
    """``cached_tokens`` and receipts reveal nothing about another owner's prompts, for any salt or user."""

    def cached(client: httpx.Client, **more: Any) -> int:
        usage = ask(client, "Sent by nobody before: " + LONG, **more)
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    cached(alice)
    assert cached(alice) > 0
    guesses: list[dict[str, Any]] = [
        {},
        {"user": "alice"},
        {"cache_salt": "alice"},
        {"cache_salt": '["alice",null]'},
    ]
    first = [cached(bob, **guess) for guess in guesses]
    assert first == [0, first[1], 0, 0]  # The second request finds what its own owner sent.
    assert cached(alice, cache_salt="own") == 0


# ---- a flood ----


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_flood_is_refused_and_not_who_comes_beside_it(model: Path, num_processes: int) -> None:
    """At the limits of requests, prompt tokens and background responses the owner with most is refused. An
    owner below an equal share is served soon, though the other's long requests fill the batch."""
    flags = [
        *("--num-gpu-blocks-override", "600", "--max-num-seqs", "2"),
        *("--max-num-queued-reqs", "8", "--max-num-queued-tokens", "3000"),
        *("--max-background-responses", "4", "--api-server-count", str(num_processes)),
    ]
    long = {"max_tokens": 900, "ignore_eos": True}
    with running_server(model, *flags, "--api-key", f"alice:{ALICE}", f"bob:{BOB}") as server:

        async def one(key: str, text: str, **more: Any) -> int:
            body = {"messages": [{"role": "user", "content": text}], **more}
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
                return (await http.post(CHAT, json=body, headers={"x-api-key": key})).status_code

        async def floods() -> None:
            flood = [asyncio.create_task(one(ALICE, f"{number}", **long)) for number in range(20)]
            refused = 0
            while refused < 12:  # The others are accepted.
                done, _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
                assert all(task.result() == 503 for task in done)
                refused += len(done)
                flood = [task for task in flood if task not in done]
            short = {"max_tokens": 2}
            assert await asyncio.gather(*(one(BOB, f"{n}", **short) for n in range(4))) == [200] * 4
            assert await one(BOB, LONG + LONG, **short) == 200
            assert await one(ALICE, "one more", **short) == 503
            assert not any(task.done() for task in flood), "they wait, and run, as before"
            for task in flood:
                task.cancel()
            await asyncio.wait(flood)
            while await one(ALICE, "the last", **short) == 503:
                pass  # The disconnects of the flood's clients are not noticed yet.

        asyncio.run(floods())
        runs = {"input": "a", "background": True, "max_output_tokens": 900, "ignore_eos": True}
        codes = {}
        for key in (ALICE, BOB):
            with httpx.Client(base_url=server.url, headers={"x-api-key": key}, timeout=60) as http:
                codes[key] = [http.post(RESPONSES, json=runs).status_code for _ in range(12)]
        assert 503 in codes[ALICE]
        assert codes[BOB][:2] == [200, 200]
        server.process.kill()


@pytest.mark.slow
def test_connections_are_shared_too(model: Path) -> None:
    """If one owner uses all connections, another owner's is accepted and a further one of the first is not;
    of idle connections the first owner's are closed."""
    flags = ["--num-gpu-blocks-override", "600", "--max-connections", "4"]
    stream = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with (
        running_server(model, *flags, "--api-key", f"alice:{ALICE}", f"bob:{BOB}") as server,
        ExitStack() as on,
    ):

        def client(key: str) -> httpx.Client:
            return on.enter_context(httpx.Client(base_url=server.url, headers={"x-api-key": key}, timeout=60))

        resting = client(BOB)
        assert resting.get("/v1/models").status_code == 200
        for number in range(4):
            begun = on.enter_context(client(ALICE).stream("POST", "/v1/completions", json=stream))
            if number < 3:
                assert begun.status_code == 200
        assert client(ALICE).get("/v1/models").status_code == 503
        assert client(BOB).get("/v1/models").status_code == 200
        server.process.kill()


# ---- several API server processes ----


@pytest.mark.slow
def test_owners_share_a_store_of_several_processes(model: Path) -> None:
    """Every process finds its owners' responses, and no one else's."""
    flags = ["--num-gpu-blocks-override", "200", "--api-server-count", "2"]
    with running_server(model, *flags, "--api-key", f"alice:{ALICE}", f"bob:{BOB}") as server:

        async def asks() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
                made = await http.post(
                    RESPONSES,
                    json={"input": SECRET, "max_output_tokens": 2},
                    headers={"x-api-key": ALICE},
                )
                path = f"{RESPONSES}/{made.json()['id']}"

                async def code(key: str) -> int:
                    async with httpx.AsyncClient(base_url=server.url, timeout=60) as other:
                        return (await other.get(path, headers={"x-api-key": key})).status_code

                keys = [ALICE, BOB] * 8
                codes = await asyncio.gather(*map(code, keys))
                assert codes == [200, 404] * 8

        asyncio.run(asks())
        assert server.interrupt() == 0


@pytest.mark.slow
def test_prefixes_may_be_shared(model: Path) -> None:
    """With the operator's flag, owners share cached prefixes."""
    flags = ["--num-gpu-blocks-override", "200", "--share-prefixes-across-tenants"]
    with running_server(model, *flags, "--api-key", f"alice:{ALICE}", f"bob:{BOB}") as server:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for key, cached in ((ALICE, False), (BOB, True)):
                http.headers["x-api-key"] = key
                assert bool(ask(http, LONG)["prompt_tokens_details"]["cached_tokens"]) is cached
        assert server.interrupt() == 0


def call_tool(client: httpx.Client, job_id: str) -> tuple[str, dict[str, Any]]:
    """A job's first turn, which calls a tool: the prompt that continues it, and the branch's decision."""
    prompt = f"{job_id} reads a file of the folder and says what is in it"
    answer = client.post("/v1/completions", json={"prompt": prompt, "job_id": job_id, "max_tokens": 4}).json()
    told = {"state": "started", "tool": "read_file"}
    decided: dict[str, Any] = client.post(f"/v1/jobs/{job_id}/signals", json=told).json()["branches"][0]
    return prompt + answer["choices"][0]["text"] + " and so on", decided


def bring_result(client: httpx.Client, job_id: str, prompt: str) -> None:
    said = {"prompt": prompt, "job_id": job_id, "max_tokens": 4, "is_last_step": True}
    assert client.post("/v1/completions", json=said).status_code == 200


@pytest.mark.slow
def test_what_one_owners_tools_take_decides_nothing_for_another(
    alice: httpx.Client, bob: httpx.Client
) -> None:
    """Fifty long calls of bob's, after five shorter ones of alice's, do not change the prediction for her
    next call."""
    for client, name, number in ((alice, "short", 5), (bob, "long", 50)):
        prompts = {f"{name}{each}": call_tool(client, f"{name}{each}")[0] for each in range(number)}
        for job_id, prompt in prompts.items():
            bring_result(client, job_id, prompt)
        _, of_alice = call_tool(alice, f"alice-beside-{name}")
        _, of_bob = call_tool(bob, f"bob-beside-{name}")
        assert of_alice["num_observations"] == pytest.approx(9, abs=0.5)  # All her calls lend 4.
        assert of_bob["num_observations"] > 30 if name == "long" else of_bob["num_observations"] == 0
    assert of_bob["expected_return_s"] > 2 * of_alice["expected_return_s"]
