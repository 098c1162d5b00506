"""A server is drained: its jobs go on until a deadline, new ones are refused, and what is left moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, running_server
from tests.api.test_jobs_endpoints import Body, ask, call, receipt
from tests.processes.support import until

WORDS = "a job of many words " * 12

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "m", max_position_embeddings=2048)


@pytest.fixture(
    scope="module",
    params=[(), ("--api-server-count", "2"), ("--data-parallel-size", "2")],
    ids=["one core", "two front ends", "two cores"],
)
def servers(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """The one that is drained, and another that shares its folder."""
    shared = ("--kv-handover-path", str(tmp_path_factory.mktemp("kv")), "--num-gpu-blocks-override", "600")
    with running_server(model, *shared, *request.param) as one, running_server(model, *shared) as two:
        yield one, two


@pytest.fixture
def http(servers: tuple[Server, Server]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=servers[0].url, timeout=60) as client:
        yield client
        assert drain(client, off="true") == {"state": "up"}


def drain(http: httpx.Client, **fields: Any) -> Body:
    answer = http.post("/drain", params=fields)
    assert answer.status_code == 200, answer.text
    told: Body = answer.json()
    return told


def state(http: httpx.Client) -> str:
    return str(http.get("/engines").json()["server"])


def refusal(http: httpx.Client, **fields: Any) -> int:
    body = {"model": "tiny", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 4}
    return http.post("/v1/chat/completions", json={**body, **fields}).status_code


def test_known_jobs_go_on_and_new_ones_are_refused(http: httpx.Client) -> None:
    """Named and inferred jobs, and their sub-agents, whole and streamed; the server is drained when no pin
    is left, and takes new jobs again when told."""
    named = call(http, f"named {WORDS}", job_id="named")
    inferred = call(http, f"inferred {WORDS}")
    assert drain(http, deadline_s=600) == {"state": "draining"}
    assert state(http) == "draining"
    for fields in (
        {},
        {"job_id": "new"},
        {"n": 2},
        {"stream": True},
        {"parent_job_id": "none", "job_id": "x"},
    ):
        assert refusal(http, **fields) == 503
    error = http.post("/v1/responses", json={"model": "tiny", "input": WORDS}).json()
    assert "being drained" in str(error)
    sub_agent = ask(http, [{"role": "user", "content": "sub"}], job_id="sub", parent_job_id="named")
    assert receipt(sub_agent)["turn"] == 1
    for (messages, first), fields in ((named, {"job_id": "named"}), (inferred, {})):
        second = receipt(ask(http, messages, is_last_step=True, **fields))
        assert (second["job_id"], second["turn"]) == (receipt(first)["job_id"], 2)
        assert second["recomputed_tokens"] == 0
    assert http.get("/v1/jobs/sub").status_code == 404, "it ended with the job that waited for it"
    until(lambda: state(http) == "drained")
    assert refusal(http, job_id="named") == 503
    assert drain(http, off="true") == {"state": "up"}
    assert refusal(http) == 200


def test_what_is_left_at_the_deadline_moves(servers: tuple[Server, Server], http: httpx.Client) -> None:
    """The jobs go on at the other server with all they had computed."""
    jobs = {name: call(http, f"{name} {WORDS}", job_id=name) for name in ("left-1", "left-2", "left-3")}
    told = drain(http, deadline_s=0.1, wait="true")
    assert told["state"] == state(http) == "drained"
    assert told["moved"]["turns"] == len(jobs)
    assert told["moved"]["left"] == 0
    with httpx.Client(base_url=servers[1].url, timeout=60) as other:
        for name, (messages, first) in jobs.items():
            assert refusal(http, job_id=name) == 503
            second = receipt(ask(other, messages, job_id=name, is_last_step=True))
            assert second["turn"] == 2
            assert second["cached_tokens"] == receipt(first)["pinned_tokens"]
            assert second["recomputed_tokens"] == 0


def test_a_drain_that_another_process_ends_closes_nothing(http: httpx.Client) -> None:
    """Whichever front end is asked, the last word counts."""
    call(http, f"paused {WORDS}", job_id="paused")
    for _ in range(6):
        with httpx.Client(base_url=http.base_url, timeout=60) as one:
            drain(one, deadline_s=0.2)
        with httpx.Client(base_url=http.base_url, timeout=60) as other:
            drain(other, off="true")
    passed = [refusal(http, job_id=f"after-{number}") for number in range(12)]
    assert passed == [200] * 12
    assert state(http) == "up"
    for name in ("paused", *(f"after-{number}" for number in range(12))):
        http.post(f"/v1/jobs/{name}/finish")


def test_running_answers_end_as_they_would(http: httpx.Client) -> None:
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "tiny", "prompt": "run on", "max_tokens": 200, "temperature": 0}
    expected = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
    stream = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
    text = next(stream).choices[0].text
    drain(http)
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == expected
    until(lambda: state(http) == "drained")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"deadline_s": "-1"}, "deadline_s"),
        ({"wait": "x"}, "wait"),
        ({"engine": "x"}, "engine"),
        ({"engin": "0"}, "engin"),
    ],
)
def test_what_is_wrong_is_said(http: httpx.Client, fields: Body, said: str) -> None:
    answer = http.post("/drain", params=fields)
    assert answer.status_code == 400
    assert said in answer.text
