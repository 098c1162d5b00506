"""The access log: who asked what, and what it took; never what was said."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from continuum.cli.main import main
from tests.api.server import running_server
from tests.api.test_service import eventually

SECRET = "xyzzy"
CHAT = "/v1/chat/completions"
HOSTS = ("--allowed-hosts", "good.example")
Line = dict[str, Any]


class Logged:
    """A server with keys, and its log."""

    def __init__(self, url: str, path: Path) -> None:
        self.http = httpx.Client(base_url=url, headers={"Authorization": "Bearer key-of-alice"}, timeout=60)
        self.url = url
        self.path = path

    def lines(self) -> list[Line]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def last(self, request_id: str) -> Line:
        """The line of a request, once its client has the whole answer."""
        assert eventually(lambda: any(line["request_id"] == request_id for line in self.lines()))
        return next(line for line in self.lines() if line["request_id"] == request_id)

    def ask(self, request_id: str, route: str, **body: Any) -> httpx.Response:
        return self.http.post(route, json=body, headers={"x-request-id": request_id})


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def logged(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Logged]:
    path = tmp_path_factory.mktemp("log") / "access.jsonl"
    keys = ("--api-key", "alice:key-of-alice", "--api-key", "operator-key")
    flags = ("--num-gpu-blocks-override", "400", "--api-server-count", str(request.param))
    with running_server(model, *flags, *keys, *HOSTS, "--access-log", str(path)) as server:
        logged = Logged(server.url, path)
        yield logged
        logged.http.close()
        assert SECRET not in path.read_text()


def messages() -> list[Line]:
    return [{"role": "user", "content": f"say {SECRET} " * 20}]


def whole(logged: Logged, name: str) -> Line:
    answer = logged.ask(name, CHAT, messages=messages(), max_tokens=5, job_id="main", user="u")
    usage: Line = answer.json()["usage"]
    return usage


def streamed(logged: Logged, name: str) -> Line:
    body = {"messages": messages(), "max_tokens": 5, "job_id": "main", "stream": True}
    answer = logged.ask(name, CHAT, **body, stream_options={"include_usage": True})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    usage: Line = json.loads(events[-1])["usage"]
    return usage


def two_prompts(logged: Logged, name: str) -> Line:
    prompts = [f"{SECRET} one " * 9, f"{SECRET} two " * 9]
    usage: Line = logged.ask(name, "/v1/completions", prompt=prompts, n=2, max_tokens=4).json()["usage"]
    return usage


@pytest.mark.slow
@pytest.mark.parametrize("ask", [whole, streamed, two_prompts])
def test_tokens_are_those_of_usage(logged: Logged, ask: Callable[[Logged, str], Line]) -> None:
    usage = ask(logged, ask.__name__)
    line = logged.last(ask.__name__)
    assert (line["method"], line["status"], line["key"]) == ("POST", 200, "alice")
    assert line["client"] == "127.0.0.1"
    assert line["duration_s"] > 0
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["output_tokens"] == usage["completion_tokens"]
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert len(line["decisions"]) == (2 if ask is two_prompts else 1)
    if ask is not two_prompts:
        assert (line["job"], line["tenant"]) == ("alice:main", "alice")
        assert line["turn"] == usage["receipt"]["turn"]


@pytest.mark.slow
def test_what_is_refused_or_of_operators_is_logged_too(logged: Logged) -> None:
    """A wrong key, a wrong body, and an operator's call; what counted no tokens has none. Probes are not."""
    for name, key, route, status in (
        ("wrong-key", "nobody", CHAT, 401),
        ("wrong-body", "key-of-alice", CHAT, 400),
        ("operator", "operator-key", "/reset_prefix_cache", 200),
    ):
        headers = {"Authorization": f"Bearer {key}", "x-request-id": name}
        assert logged.http.post(route, json={"messages": SECRET}, headers=headers).status_code == status
        line = logged.last(name)
        assert (line["path"], line["status"]) == (route, status)
        assert "prompt_tokens" not in line
        assert line.get("key") == ("alice" if key == "key-of-alice" else None)
    logged.http.get("/health", headers={"x-request-id": "probe"})
    assert all(line["request_id"] != "probe" for line in logged.lines())


@pytest.mark.slow
def test_an_answer_that_its_client_leaves_has_the_tokens_that_had_come(logged: Logged) -> None:
    body = {"messages": messages(), "max_tokens": 500, "ignore_eos": True, "stream": True}
    with logged.http.stream("POST", CHAT, json=body, headers={"x-request-id": "left"}) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert len([*islice(events, 5)]) == 5
    line = logged.last("left")
    assert 0 < line["output_tokens"] < 500
    assert "cached_tokens" not in line


@pytest.mark.slow
def test_a_file_that_was_moved_is_opened_again(logged: Logged) -> None:
    whole(logged, "before")
    logged.last("before")
    logged.path.rename(logged.path.with_suffix(".1"))
    logged.path.touch()
    whole(logged, "after")
    assert logged.last("after")["status"] == 200
    assert [line["request_id"] for line in logged.lines()] == ["after"]


@pytest.mark.slow
def test_a_lost_file_costs_no_request_anything(logged: Logged) -> None:
    """Its folder is gone, and comes back: requests are answered all the time, and logged again."""
    away = logged.path.parent.with_suffix(".away")
    logged.path.parent.rename(away)
    assert whole(logged, "unlogged")["completion_tokens"] > 0
    away.rename(logged.path.parent)
    whole(logged, "logged-again")
    assert logged.last("logged-again")["status"] == 200


@pytest.mark.slow
def test_a_client_cannot_write_another_name(logged: Logged) -> None:
    """Also where it is refused before its key is looked at."""
    headers = {"x-continuum-owner": "alice", "host": "evil.example", "x-request-id": "forged"}
    answer = httpx.post(f"{logged.url}{CHAT}", headers=headers, json={})
    assert answer.status_code in (401, 403, 421)
    line = logged.last("forged")
    assert "key" not in line


def test_a_file_that_cannot_be_written_is_said(model: Path, tmp_path: Path) -> None:
    assert main(["serve", str(model), "--access-log", str(tmp_path / "no" / "folder")]) == 2
