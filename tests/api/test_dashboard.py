"""Promises of the dashboard: the page runs only its own code, and the feed costs nothing without viewers."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from engine.api.config import ServerConfig
from engine.api.dashboard.audience import BACKLOG_VIEWS, MAX_VIEWERS, Viewers
from engine.api.errors import OverloadedError, ServerClosingError
from engine.api.service.server import Server as ApiServer
from engine.core.policy import fcfs
from engine.core_process.core_client import AsyncMPClient
from engine.core_process.core_start import CoreSpec
from engine.core_process.launcher import CoreProcess
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.llm import engine_config
from engine.testing import FakeExecutorFactory
from engine.watch.view import View
from tests.api.server import Server

PATIENCE_S = 60.0


@contextmanager
def feed(url: str) -> Iterator[Iterator[tuple[str, Any]]]:
    """Yields the decoded events of one viewer with their names."""
    with httpx.Client(timeout=PATIENCE_S) as http, http.stream("GET", f"{url}/dashboard/feed") as stream:
        assert stream.status_code == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        yield _events(stream.iter_lines())


def _events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def num_viewers(http: httpx.Client) -> float:
    (line,) = re.findall(r"^continuum:dashboard_viewers\{.*\} (.*)$", http.get("/metrics").text, re.MULTILINE)
    return float(line)


def await_viewers(http: httpx.Client, number: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while num_viewers(http) != number:
        assert time.monotonic() < deadline, f"there should be {number} viewers"


def complete(http: httpx.Client, **body: object) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 8, **body})
    assert answer.status_code == 200


# ---- over HTTP ----


def test_the_page_runs_nothing_but_its_own(http: httpx.Client) -> None:
    """The page's policy allows one script and one style by digest, and requests to this server only."""
    answer = http.get("/dashboard")
    assert answer.headers["content-type"].startswith("text/html")
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ") if " " in part
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    for risk in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert risk not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_feed_says_whose_it_is_and_then_what_happens(server: Server, http: httpx.Client) -> None:
    """The feed sends a hello, then views of the engine; the first view is complete."""
    with feed(server.url) as events:
        name, hello = next(events)
        assert (name, hello["model"], hello["knows_jobs"]) == ("hello", "tiny", True)
        name, first = next(events)
        assert name == "view"
        view = msgspec.convert(first, View)
        assert view.scene is not None
        assert view.gauges.total_blocks == view.scene.blocks.num_blocks == 399
        complete(http)
        views = (msgspec.convert(data, View) for _, data in events)
        told = next(view for view in views if view.totals.generated_tokens)
        assert told.now > view.now


def test_only_readers_are_counted_and_fed(server: Server, http: httpx.Client) -> None:
    """The gauge of viewers rises with each viewer and returns to zero."""
    await_viewers(http, 0)
    with feed(server.url) as one, feed(server.url) as other:
        next(one), next(other)
        await_viewers(http, 2)
    await_viewers(http, 0)


@pytest.mark.slow
def test_a_viewer_that_does_not_read_stops_nobody(server: Server, http: httpx.Client) -> None:
    """While one viewer's buffer is full, requests are answered and other viewers get their events."""
    address = urlsplit(server.url)
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        stuck.connect((address.hostname, address.port))
        stuck.sendall(b"GET /dashboard/feed HTTP/1.1\r\nHost: here\r\n\r\n")
        await_viewers(http, 1)
        with feed(server.url) as events:
            next(events)
            for _ in range(10):
                complete(http)
                assert next(events)[0] == "view"
    await_viewers(http, 0)


def test_a_job_is_told_with_its_turns(http: httpx.Client) -> None:
    """A job's details include its turns; an unknown job is no error."""
    messages = [{"role": "user", "content": "look " * 30}]
    body = {"messages": messages, "job_id": "looked/at", "max_tokens": 4}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    life = http.get("/dashboard/jobs/looked%2Fat").json()
    (turn,) = life["past_turns"]
    assert (turn["output_steps"], turn["drafted_tokens"], turn["accepted_tokens"]) == (4, 0, 0)
    assert (life["job"]["id"], turn["turn"], turn["output_tokens"]) == ("looked/at", 1, 4)
    nobody = http.get("/dashboard/jobs/nobody").json()
    assert (nobody["job"], nobody["past_turns"]) == (None, [])
    assert "/dashboard" not in http.get("/openapi.json").text


# ---- one process's audience ----


@pytest.fixture
async def served(model: Path) -> AsyncIterator[ApiServer]:
    config = engine_config(str(model), num_gpu_blocks_override=300)
    engine = AsyncLLM(config, AsyncMPClient(CoreProcess(CoreSpec(config, FakeExecutorFactory(), fcfs))))
    yield ApiServer(engine, ServerConfig(served_model_names=("tiny",)))
    engine.shutdown()


@pytest.mark.slow
async def test_who_reads_slowly_misses_views(served: ApiServer) -> None:
    """A slow viewer gets the newest views and then a complete one; a fast viewer misses none."""
    audience = Viewers(served)
    async with aclosing(audience.views()) as quick, aclosing(audience.views()) as slow:
        first = msgspec.json.decode(await anext(slow), type=View)
        for _ in range(2 * BACKLOG_VIEWS):
            last = msgspec.json.decode(await anext(quick), type=View)
        missed = msgspec.json.decode(await anext(slow), type=View)
        assert missed.now - first.now > (last.now - first.now) / 4
        views = [missed]
        while views[-1].now < last.now:
            views.append(msgspec.json.decode(await anext(slow), type=View))
        assert len(views) <= BACKLOG_VIEWS
        assert any(view.scene is not None for view in views)


@pytest.mark.slow
async def test_there_is_a_most_of_viewers(served: ApiServer) -> None:
    """A viewer beyond the limit is refused until one has left."""
    audience = Viewers(served)
    viewers = [audience.views() for _ in range(MAX_VIEWERS)]
    await asyncio.gather(*(anext(viewer) for viewer in viewers))
    with pytest.raises(OverloadedError):
        await anext(audience.views())
    await viewers.pop().aclose()
    viewers.append(audience.views())
    await anext(viewers[-1])
    await asyncio.gather(*(viewer.aclose() for viewer in viewers))


async def test_a_server_that_stops_ends_its_feeds(served: ApiServer) -> None:
    """A stopping server ends its feeds with a reason; no open page delays it."""
    viewer = Viewers(served).views()
    await anext(viewer)
    served.admission.close()
    await served.admission.all_ended()
    with pytest.raises(ServerClosingError):
        async for _ in viewer:
            pass
    with pytest.raises(ServerClosingError):
        await anext(Viewers(served).views())
