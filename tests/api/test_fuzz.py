"""Promises about malformed requests: each is answered soon and does no harm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.malformed_bodies import POOLING_BODIES, VALID_BODIES, MalformedBody, malformed_bodies
from tests.api.server import Server, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEED = 20260
NUM_BODIES = 2600
NUM_CLIENTS = 4
MAX_ANSWER_S = 20.0
"""Longer counts as a hang; the limit allows for a busy machine."""
MAX_ERROR_BYTES = 16_000
MAX_GROWTH_KIB = 96 * 1024
WARM_UP = 600
"""Requests after which everything that is created once exists."""

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "unsupported_method"
)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "server.log"


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[Server]:
    """A server with a short context and short answers, so that accepted requests end soon."""
    model = make_model_folder(tmp_path_factory.mktemp("models") / "short", max_position_embeddings=640)
    (model / "generation_config.json").write_text('{"max_new_tokens": 8}')
    with running_server(model, "--num-gpu-blocks-override", "400", log=log) as running:
        yield running
        assert running.interrupt() == 0


@pytest.fixture
def http(fuzzed: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fuzzed.url, timeout=MAX_ANSWER_S) as client:
        yield client


CODES = ("context_length_exceeded", "model_not_found", "conversation_locked")
"""OpenAI's codes that replace the status."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to a body, and its latency."""

    sent: MalformedBody
    status: int
    content: bytes
    seconds: float

    @property
    def where(self) -> str:
        return f"{self.sent.path} ({self.sent.change}): {self.status} {self.content[:300]!r}"


def test_the_corpus_is_what_it_says() -> None:
    """The corpus has over two thousand different bodies, the same in every run; unchanged ones are valid."""
    bodies = [body.body for body in malformed_bodies(NUM_BODIES, SEED)]
    assert len(set(bodies)) > 2000
    assert bodies == [body.body for body in malformed_bodies(NUM_BODIES, SEED)]


OF_OPERATORS = {"/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
"""Bodies that only operators' servers accept: see tests/api/test_sleep.py and test_adapters.py."""


def test_the_corpus_knows_every_endpoint(http: httpx.Client) -> None:
    """The corpus has a valid example for each body in the server's OpenAPI document."""
    paths = http.get("/openapi.json").json()["paths"]
    described = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert described - OF_OPERATORS == VALID_BODIES.keys() | POOLING_BODIES.keys()
    for path, bodies in VALID_BODIES.items():
        if "{" in path:
            continue  # No such job or conversation exists.
        for body in bodies:
            answer = http.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)


def test_malformed_bodies_are_refused_and_leave_nothing_behind(
    http: httpx.Client, fuzzed: Server, log: Path
) -> None:
    """Malformed bodies cause no 5xx, no hang and no growth; errors are small and name the field."""
    bodies = list(malformed_bodies(NUM_BODIES, SEED))
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:

        def ask(some: list[MalformedBody]) -> list[Answer]:
            return list(clients.map(lambda body: _ask(http, body), some))

        answers = ask(bodies[:WARM_UP])
        before = [resident_kib(pid) for pid in (fuzzed.process.pid, fuzzed.core_pid())]
        answers += ask(bodies[WARM_UP:])
    after = [resident_kib(pid) for pid in (fuzzed.process.pid, fuzzed.core_pid())]

    assert [answer.where for answer in answers if answer.status >= 500] == []
    assert [answer.where for answer in answers if answer.seconds > MAX_ANSWER_S] == []
    refused = [answer for answer in answers if answer.status >= 400]
    assert len(refused) > NUM_BODIES / 2
    assert [fault for answer in refused for fault in faults(answer)] == []
    assert all(grown < MAX_GROWTH_KIB for grown in (b - a for a, b in zip(before, after, strict=True))), (
        before,
        after,
    )
    assert "Traceback" not in log.read_text()
    assert_unharmed(http)


@pytest.mark.long
def test_schemathesis_finds_nothing(http: httpx.Client, fuzzed: Server, log: Path, tmp_path: Path) -> None:
    """Requests that the OpenAPI document allows or forbids never cause a 5xx; responses match the
    document."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{fuzzed.url}/openapi.json"]
    options = {
        "checks": CHECKS,
        "phases": "coverage,fuzzing",
        "mode": "all",
        "max-examples": "40",
        "request-timeout": str(MAX_ANSWER_S),
        "suppress-health-check": "all",
        "warnings": "off",
        "exclude-path": "/drain",  # a drained server refuses all requests
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    run = subprocess.run(
        [*command, *flags, "--generation-deterministic", "--no-color"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "Traceback" not in log.read_text()
    assert_unharmed(http)


def _ask(http: httpx.Client, body: MalformedBody) -> Answer:
    started = time.monotonic()
    answer = http.post(
        re.sub("{.*?}", "conv_1", body.path), content=body.body, headers={"Content-Type": body.content_type}
    )
    return Answer(body, answer.status_code, answer.content, time.monotonic() - started)


def faults(answer: Answer) -> Iterator[str]:
    """Yields each fault in the refusal of a body."""
    if len(answer.content) > MAX_ERROR_BYTES:
        yield f"large: {answer.where}"
    told = json.loads(answer.content)
    error = told["error"]
    if not error["message"] or not error["type"] or ".py" in error["message"]:
        yield f"unclear: {answer.where}"
    if answer.sent.path.startswith("/v1/messages"):
        if told["type"] != "error":
            yield f"not Anthropic's: {answer.where}"
    elif error["code"] not in (answer.status, *CODES):
        yield f"not OpenAI's: {answer.where}"
    elif answer.status == 400 and error["param"] is None and is_object(answer.sent.body):
        yield f"names no field: {answer.where}"


def is_object(body: bytes) -> bool:
    """Whether this is standard JSON with fields, not too deep to be read."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        value = json.loads(body.decode(), parse_constant=refuse, object_pairs_hook=list)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return body.lstrip()[:1] == b"{" and b"[" * 150 not in body and b'{"a":' * 150 not in body


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def assert_unharmed(http: httpx.Client) -> None:
    """Asserts that the server works and nothing is running, waiting or counted."""
    body = {"prompt": "Once", "max_tokens": 3, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
    deadline = time.monotonic() + 60
    while http.get("/load").json()["server_load"] or not http.post("/reset_prefix_cache").json()["success"]:
        assert time.monotonic() < deadline
