"""``continuum route`` with two real servers: jobs stay on their server, and a dead server loses no job."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import trustme
from fastapi.routing import APIRoute
from starlette.types import Message

from engine.api.app import ROUTERS
from engine.routing import EngineLoad
from engine.worker.loading.tiny_models import make_model_folder
from eval.route.fleet import read_metrics
from eval.route.operators import CHANGE_ONE_SERVER
from eval.route.proxy import PassedOn
from eval.route.told import turn_of
from tests.api.server import Server, running_server
from tests.api.test_tenants import FOR_OPERATORS

WITHIN_S = 60.0
SENTENCE = "the quick brown fox jumps over the lazy dog "
Body = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "m", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[tuple[Server, Server]]:
    flags = ("--num-gpu-blocks-override", "600")
    with running_server(model, *flags) as one, running_server(model, *flags) as two:
        yield one, two


@contextmanager
def running_route(*arguments: str, scheme: str = "http") -> Iterator[str]:
    """Runs a route to these servers; yields its address."""
    with httpx.Client(verify=False) as probe:
        port = free_port()
        command = [sys.executable, "-m", "continuum.cli", "route", *arguments, "--port", str(port)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        try:
            url = f"{scheme}://127.0.0.1:{port}"
            until(lambda: answers(probe, url))
            yield url
            process.send_signal(signal.SIGINT)
            assert process.wait(15) == 0
        finally:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def answers(probe: httpx.Client, url: str) -> bool:
    try:
        return probe.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"


@pytest.fixture(scope="module")
def route(servers: tuple[Server, Server]) -> Iterator[str]:
    with running_route(*(server.url for server in servers)) as url:
        yield url


def num_answers(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return sum(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:request_success_total")
    )


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_jobs_stay_on_their_server(route: str, servers: tuple[Server, Server], named: bool) -> None:
    """Every turn of a job but the first finds its prompt cached, and both servers get jobs."""
    chats: list[list[Any]] = [[] for _ in range(8)]
    before = [num_answers(server) for server in servers]
    with openai.OpenAI(base_url=f"{route}/v1", api_key="none") as client:
        for number in range(3):
            for index, said in enumerate(chats):
                said.append({"role": "user", "content": f"{named} {index} {number} {SENTENCE * 8}"})
                extra = {"job_id": f"job-{index}"} if named else {}
                answer = client.chat.completions.create(
                    model="tiny",
                    messages=said,
                    max_tokens=4,
                    temperature=0,
                    extra_body=extra,
                )
                said.append({"role": "assistant", "content": answer.choices[0].message.content})
                if number:
                    assert answer.usage is not None
                    assert answer.usage.prompt_tokens_details is not None
                    cached = answer.usage.prompt_tokens_details.cached_tokens
                    assert (cached or 0) >= answer.usage.prompt_tokens // 3
    grown = [num_answers(server) - then for server, then in zip(servers, before, strict=True)]
    assert sum(grown) == 24
    assert not named or min(grown) >= 3  # Unnamed jobs go to the server with fewer of the others.


@pytest.mark.slow
def test_it_names_the_server_that_costs_least_to_end(route: str, servers: tuple[Server, Server]) -> None:
    """The one whose paused jobs hold less; calls that change one server are not given to any."""
    for server, num_tokens in zip(servers, (3000, 64), strict=True):
        for job in httpx.get(f"{server.url}/v1/jobs?limit=1000").json()["data"]:  # other tests'
            httpx.post(f"{server.url}/v1/jobs/{job['id']}/finish").raise_for_status()
        turn = {"prompt": [7] * num_tokens, "max_tokens": 1, "job_id": "big" if num_tokens > 64 else "small"}
        assert httpx.post(f"{server.url}/v1/completions", json=turn, timeout=60).status_code == 200
    told = httpx.get(f"{route}/engines").json()
    pinned = {each["url"]: each["num_pinned_blocks"] for each in told["data"]}
    assert pinned.keys() == {server.url for server in servers}
    assert pinned[servers[0].url] >= 3000 // 16
    assert told["cheapest_to_end"] == min(pinned, key=lambda url: pinned[url]) == servers[1].url
    refused = httpx.post(f"{route}/drain")
    assert refused.status_code == 400
    assert "to that server itself" in refused.json()["error"]["message"]
    assert {httpx.get(f"{server.url}/engines").json()["server"] for server in servers} == {"up"}


def test_a_route_passes_on_no_call_of_an_operator() -> None:
    changes = {
        path.path
        for router in ROUTERS
        for path in router.routes
        if isinstance(path, APIRoute) and path.path in FOR_OPERATORS and "POST" in (path.methods or ())
    }
    assert changes
    assert changes <= CHANGE_ONE_SERVER


@pytest.mark.slow
def test_streams_and_stored_responses_pass(route: str) -> None:
    """Streams of both client APIs pass event by event; a stored response is found on its server."""
    with openai.OpenAI(base_url=f"{route}/v1", api_key="none") as client:
        for number in range(4):
            stream = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": f"{number}"}], max_tokens=5, stream=True
            )
            assert len(list(stream)) >= 2
            first = client.responses.create(model="tiny", input=f"hello {number}", max_output_tokens=16)
            second = client.responses.create(
                model="tiny", input="and now?", max_output_tokens=16, previous_response_id=first.id
            )
            assert second.previous_response_id == first.id
            assert client.responses.retrieve(first.id).id == first.id
        assert [model.id for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_nobody_has_this")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=-1
            )
    with (
        anthropic.Anthropic(base_url=route, api_key="none") as other,
        other.messages.stream(
            model="tiny", max_tokens=5, messages=[{"role": "user", "content": "hello"}]
        ) as stream_of_events,
    ):
        assert stream_of_events.get_final_message().usage.output_tokens == 5
    httpx.post(f"{route}/v1/completions", json={"prompt": "a", "max_tokens": 1, "job_id": "listed"})
    assert "listed" in {job["id"] for job in httpx.get(f"{route}/v1/jobs").json()["data"]}
    assert httpx.get(f"{route}/v1/jobs/listed").json()["id"] == "listed"


@pytest.mark.slow
def test_a_server_that_dies_loses_nothing_but_its_streams(model: Path) -> None:
    """Jobs continue on the other server; with none left the route reports it, and resumes when one is
    back."""
    flags = ("--num-gpu-blocks-override", "300")
    with (
        running_server(model, *flags) as one,
        running_server(model, *flags) as two,
        running_route(one.url, two.url) as route,
        httpx.Client(base_url=route, timeout=60) as http,
    ):
        jobs = [f"job-{number}" for number in range(6)]

        def ask(job: str) -> httpx.Response:
            return http.post("/v1/completions", json={"prompt": job, "max_tokens": 2, "job_id": job})

        assert {ask(job).status_code for job in jobs} == {200}
        with ExitStack() as stack:
            streams = [stack.enter_context(endless(http, f"stream-{number}")) for number in range(6)]
            lines = [stream.iter_lines() for stream in streams]
            for each in lines:
                assert next(each).startswith("data: ")
            on_one = [index for index in range(6) if has_job(one, f"stream-{index}")]
            assert 0 < len(on_one) < 6, "both servers have some"
            os.kill(one.process.pid, signal.SIGKILL)
            one.process.wait()
            for index in on_one:
                assert any("has died" in line for line in lines[index])
            for index in set(range(6)) - set(on_one):
                assert next(line for line in lines[index] if line).startswith("data: ")
        assert {ask(job).status_code for job in jobs} == {200}
        until(lambda: "down" in http.get("/health").json()["servers"].values())
        assert http.get("/health").status_code == 200
        os.kill(two.process.pid, signal.SIGKILL)
        two.process.wait()
        refused = ask("job-0")
        assert refused.status_code == 503
        assert "None of the servers answers" in refused.json()["error"]["message"]
        until(lambda: http.get("/health").status_code == 503)


@pytest.mark.parametrize(
    ("chunks", "length"), [([b"ab", b"cd"], 4), ([b"abcd"], 4), ([], 0), ([b"ab", b"cd"], None), ([], 9)]
)
async def test_the_last_byte_of_a_known_length_ends_the_answer(
    chunks: list[bytes], length: int | None
) -> None:
    """After the last byte a client may send its next request on the connection; HEAD has no body."""

    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "asgi": {}, "method": "HEAD" if length == 9 else "GET"}
    headers = {} if length is None else {"content-length": str(length)}
    answer = httpx.Response(200, headers=headers, content=body())
    await PassedOn(answer, None, lambda text: None)(scope, receive, send)
    bodies = sent[1:]
    assert b"".join(each["body"] for each in bodies) == b"".join(chunks)
    assert [each["more_body"] for each in bodies] == [True] * (len(bodies) - 1) + [False]
    assert len(bodies) == max(1, len(chunks)) + (length is None)


@pytest.mark.slow
def test_several_routes_agree_where_a_job_is(servers: tuple[Server, Server]) -> None:
    """Turns of a job, and of stored responses, go through two routes that know nothing of each other."""
    urls = [server.url for server in servers]
    with running_route(*urls) as one, running_route(*urls) as two:
        clients = [openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in (one, two)]
        for job in range(6):
            messages: list[Any] = [{"role": "user", "content": f"{job} {SENTENCE * 12}"}]
            for turn in range(4):
                answer = clients[(job + turn) % 2].chat.completions.create(
                    model="tiny", messages=messages, max_tokens=4, extra_body={"job_id": f"shared-{job}"}
                )
                usage = answer.usage
                assert usage is not None
                assert usage.prompt_tokens_details is not None
                assert (usage.prompt_tokens_details.cached_tokens or 0) >= 100 * bool(turn)
                text = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
            assert sum(has_job(server, f"shared-{job}") for server in servers) == 1
        for number in range(4):
            first = clients[number % 2].responses.create(model="tiny", input=SENTENCE, max_output_tokens=4)
            following = clients[(number + 1) % 2].responses.create(
                model="tiny", input="more", previous_response_id=first.id, max_output_tokens=4
            )
            assert following.previous_response_id == first.id


@pytest.mark.slow
def test_a_route_has_keys_and_certificates_of_its_own(model: Path, tmp_path: Path) -> None:
    """Clients reach it over TLS with its key; servers, over TLS too, get theirs."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "cert.pem")
    tls = ("--ssl-certfile", str(tmp_path / "cert.pem"))
    trusted = ("--server-ca-certs", str(tmp_path / "ca.pem"))
    environment = {"CONTINUUM_API_KEY": "of-the-servers"}
    body = {"prompt": "x", "max_tokens": 2, "job_id": "a-job"}
    with running_server(model, *tls, environment=environment) as server:
        keys = ("--api-key", "of-the-route", "--server-api-key", "of-the-servers")
        with running_route(server.url, *trusted, *tls, *keys, scheme="https") as url:
            context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
            with httpx.Client(base_url=url, verify=context) as http:
                for key, status in ((None, 401), ("of-the-servers", 401), ("of-the-route", 200)):
                    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                    assert http.post("/v1/completions", json=body, headers=headers).status_code == status
                assert http.get("/v1/jobs", headers={"x-api-key": "of-the-route"}).status_code == 200
                assert http.get("/health").status_code == 200
        with running_route(server.url, *trusted) as url:  # clients' keys are passed on
            for key, status in (("of-the-route", 401), ("of-the-servers", 200)):
                headers = {"Authorization": f"Bearer {key}"}
                assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == status


def endless(http: httpx.Client, job: str) -> AbstractContextManager[httpx.Response]:
    body = {"prompt": job, "max_tokens": 4000, "ignore_eos": True, "stream": True, "job_id": job}
    return http.stream("POST", "/v1/completions", json=body)


def has_job(server: Server, job: str) -> bool:
    return httpx.get(f"{server.url}/v1/jobs/{job}").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["10.0.0.1:8000"], "URL must be that of a server"),
        (["ftp://host"], "URL must be that of a server"),
        (["http://host", "--port", "0"], "--port must be from 1 to 65535"),
        ([], "the following arguments are required: URL"),
        (["http://host", "--router", "x"], "invalid choice: 'x'"),
        (["http://host", "--api-key", "me:secret"], "a route's keys have no names"),
        (["http://host", "--api-key", "secret"], "--api-key needs --server-api-key"),
        (["http://host", "--host", "0.0.0.0", "--server-api-key", "x"], "needs --api-key"),
        (["http://host", "--server-ca-certs", "/none"], "/none cannot be used"),
        (["http://host", "--ssl-certfile", "/none"], "cannot be used"),
    ],
)
def test_bad_arguments_are_told(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "continuum.cli", "route", *arguments]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert said in told.stderr


def test_a_turn_is_told_by_what_all_clients_send() -> None:
    """Headers or fields name the job; the order of fields does not change the prompt; owners are separate."""
    said = {"messages": [{"role": "user", "content": SENTENCE * 20}], "tools": [{"name": "t"}], "system": "s"}
    turned = dict(reversed(said.items()))
    one, two = (turn_of({}, json.dumps(body).encode()) for body in (said, turned))
    assert list(one.prompt_token_ids) == list(two.prompt_token_ids)
    longer = {**said, "messages": [*said["messages"], {"role": "assistant", "content": "x"}]}
    beginning = list(one.prompt_token_ids)
    assert list(turn_of({}, json.dumps(longer).encode()).prompt_token_ids)[: len(beginning)] == beginning
    assert turn_of({"x-session-id": "s1"}, b"{}").job_id == "s1"
    assert turn_of({}, b'{"prompt_cache_key": "k"}').job_id == "k"
    assert turn_of({}, b'{"previous_response_id": "resp_1", "input": "x"}').job_id == "resp_1"
    owners = {turn_of({"authorization": key}, b"{}").owner for key in ("Bearer a", "Bearer b")}
    assert len(owners | {turn_of({}, b"{}").owner}) == 3
    for broken in (b"", b"[", b"[1]", b'{"messages": 3, "job_id": {}}', b'{"metadata": 1}'):
        assert turn_of({}, broken).job_id is None


def test_loads_are_read_from_pages_of_both_servers() -> None:
    """V1's page has no pins; the loads of a server's cores are summed."""
    load = EngineLoad()
    read_metrics(
        """# HELP vllm:num_requests_running Requests.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 1.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100"} 1.0
continuum:pinned_blocks{engine="0",model_name="m"} 7.0
continuum:pinned_share{engine="0",model_name="m"} 0.06
continuum:pinned_share{engine="1",model_name="m"} 0.0
""",
        load,
    )
    assert load == EngineLoad(0, 5, 4, 200, 44, 7)
    read_metrics("nothing of use", load)
    assert (load.num_running, load.num_blocks) == (0, 0)
