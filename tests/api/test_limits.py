"""Promises about limits for each client: too large, slow or many requests are refused, others go on."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from continuum.cli.main import main
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, running_server
from tests.api.test_service import eventually, metric
from tests.api.wire import connect, is_closed_within, post, post_head, read_answer

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
MAX_BODY_BYTES, MAX_CONNECTIONS, MAX_REQUESTS, MAX_TOKENS, MAX_RUNNING = 100_000, 60, 5, 600, 2
TIMEOUT_S = 2
ENDLESS = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
CHAT_TURN = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose context is so long that a request outlives the test's other actions."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=32768)


@pytest.fixture(scope="module")
def limited(long_model: Path) -> Iterator[Server]:
    """A server with low limits."""
    flags = {
        "num-gpu-blocks-override": 6000,
        "scheduling-policy": "fcfs",
        "max-num-seqs": MAX_RUNNING,
        "max-num-queued-reqs": MAX_REQUESTS,
        "max-num-queued-tokens": MAX_TOKENS,
        "max-body-bytes": MAX_BODY_BYTES,
        "max-connections": MAX_CONNECTIONS,
        "head-timeout-s": TIMEOUT_S,
        "body-timeout-s": TIMEOUT_S,
        "sse-keep-alive-interval": 0.3,
    }
    with running_server(long_model, *(f"--{name}={value}" for name, value in flags.items())) as running:
        yield running
        assert running.interrupt() == 0


@pytest.fixture
def client(limited: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=limited.url, timeout=60) as client:
        yield client


# ---- sizes ----


@pytest.mark.parametrize(
    ("path", "kind"), [(COMPLETIONS, "RequestTooLargeError"), (MESSAGES, "request_too_large")]
)
def test_an_announced_body_too_large_is_refused_unread(limited: Server, path: str, kind: str) -> None:
    """A body announced as too large is refused unread, in the API of the path."""
    with connect(limited.url) as connection:
        connection.sendall(post_head(path, f"Content-Length: {MAX_BODY_BYTES + 1}"))
        answer = read_answer(connection)
    assert (answer.status, answer.error["type"]) == (413, kind)
    assert str(MAX_BODY_BYTES) in answer.error["message"]


@pytest.mark.parametrize(
    ("path", "kind"), [(COMPLETIONS, "RequestTooLargeError"), (MESSAGES, "request_too_large")]
)
def test_a_chunked_body_is_refused_where_it_becomes_too_large(limited: Server, path: str, kind: str) -> None:
    """A chunked body is refused at the limit; the client need not send the rest."""
    with connect(limited.url) as connection:
        connection.sendall(post_head(path, "Transfer-Encoding: chunked"))
        for _ in range(11):
            connection.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        answer = read_answer(connection)
    assert (answer.status, answer.error["type"]) == (413, kind)


def test_who_sends_too_much_gets_to_read_why(client: httpx.Client) -> None:
    """A client that sends everything before reading still gets the refusal, and the connection goes on."""
    for _ in range(2):
        answer = client.post(COMPLETIONS, content=b"x" * 5_000_000)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, 413)
    assert client.post(COMPLETIONS, json=SHORT).status_code == 200


@pytest.mark.parametrize("headers", [["X-Long: " + "x" * 100_000], [f"X-{n}: {n}" for n in range(300)]])
def test_heads_have_a_limit(limited: Server, headers: list[str]) -> None:
    """The head is limited in bytes and in number of headers."""
    with connect(limited.url) as connection:
        connection.sendall(post_head(COMPLETIONS, *headers))
        answer = read_answer(connection)
        assert (answer.status, answer.headers["connection"]) == (431, "close")


def test_what_is_not_http_is_told_so(limited: Server) -> None:
    """Other protocols get an error, for instance a TLS client on the wrong port."""
    with connect(limited.url) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        answer = read_answer(connection)
        assert (answer.status, answer.error["code"]) == (400, 400)
        assert is_closed_within(connection, 10)


def test_a_chat_template_of_a_request_is_not_run(client: httpx.Client) -> None:
    """A request's chat template is refused: it is a program that might never end."""
    forever = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    answer = client.post("/v1/chat/completions", json={**CHAT_TURN, "chat_template": forever})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")


# ---- times ----


@pytest.mark.slow
def test_a_head_has_its_time(limited: Server) -> None:
    """An incomplete head gets 408 after its time limit; a silent connection is closed."""
    with connect(limited.url) as slow, connect(limited.url) as silent:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
        answer = read_answer(slow)
        assert answer.status == 408
        assert f"{TIMEOUT_S} s" in answer.error["message"]
        assert silent.recv(100) == b""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "kind"), [(COMPLETIONS, "RequestTimeoutError"), (MESSAGES, "timeout_error")]
)
def test_a_body_has_its_time(limited: Server, path: str, kind: str) -> None:
    """A body has a time limit that further bytes do not extend."""
    with connect(limited.url) as connection:
        connection.sendall(post_head(path, "Content-Length: 1000") + b'{"prompt"')
        answer = read_answer(connection)
    assert (answer.status, answer.error["type"]) == (408, kind)


@pytest.mark.slow
def test_the_next_request_of_a_connection_has_its_time_too(limited: Server) -> None:
    """The time limit of a connection's next head starts with its first byte, not with the previous answer."""
    with connect(limited.url) as connection:
        connection.sendall(post(COMPLETIONS, SHORT))
        assert read_answer(connection).status == 200
        assert not is_closed_within(connection, TIMEOUT_S + 1)
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        connection.settimeout(30)
        assert read_answer(connection).status == 408


class Drip:
    """Many connections that send one byte a second each, until stopped."""

    def __init__(self, url: str, number: int) -> None:
        self._stack = ExitStack()
        self._connections = [self._stack.enter_context(connect(url)) for _ in range(number)]
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._drip)

    def __enter__(self) -> None:
        for connection in self._connections[::2]:  # Every second one has sent its head.
            connection.sendall(post_head(COMPLETIONS, "Content-Length: 1000"))
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._left.set()
        self._thread.join()
        self._stack.close()

    def _drip(self) -> None:
        head = post_head(COMPLETIONS)
        for number in range(len(head)):
            for connection in self._connections:
                try:
                    connection.send(head[number : number + 1])
                except OSError:  # The server has closed this one.
                    continue
            if self._left.wait(1.0):
                return


@pytest.mark.slow
def test_five_hundred_slow_clients_do_not_stop_a_normal_one(server: Server) -> None:
    """While 500 connections send one byte a second, other requests are answered as usual."""
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as normal,
        Drip(server.url, 500),
    ):
        started = time.monotonic()
        while time.monotonic() - started < 3:
            answer = normal.completions.create(model="tiny", prompt="a", max_tokens=2)
            assert answer.usage is not None
            assert answer.usage.completion_tokens <= 2
        assert httpx.get(f"{server.url}/health").status_code == 200


# ---- connections ----


def test_where_there_are_too_many_connections_an_idle_one_goes(limited: Server) -> None:
    """At the connection limit the longest idle connection is closed and the new one is served."""
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(limited.url)) for _ in range(MAX_CONNECTIONS)]
        assert httpx.get(f"{limited.url}/health").status_code == 200
        assert is_closed_within(idle[0], 10)


def test_where_all_connections_are_at_work_another_is_refused(limited: Server) -> None:
    """If all connections are at work, a new one gets 503 with a retry time; later it is served."""
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            busy = stack.enter_context(connect(limited.url))
            busy.sendall(post_head(COMPLETIONS, "Content-Length: 9", "Expect: 100-continue"))
            assert b"100 Continue" in busy.recv(1000)  # The server waits for its body.
        refused = stack.enter_context(connect(limited.url))
        answer = read_answer(refused)
        assert (answer.status, answer.error["type"]) == (503, "ServiceUnavailableError")
        assert int(answer.headers["retry-after"]) >= 1
        assert is_closed_within(refused, 10)
    assert eventually(lambda: httpx.get(f"{limited.url}/health").status_code == 200)


def test_a_pipelined_request_ends_the_connection_after_the_answer(limited: Server) -> None:
    """After the answer the connection closes: a disconnect would go unnoticed; the client may resend."""
    with connect(limited.url) as connection:
        connection.sendall(post(COMPLETIONS, SHORT) + post(COMPLETIONS, SHORT))
        answer = read_answer(connection)
        assert (answer.status, answer.body.count(b'"usage"')) == (200, 1)
        assert is_closed_within(connection, 10)


# ---- slots ----


@contextmanager
def waiting_streams(url: str, number: int, prompt: str = "a") -> Iterator[list[socket.socket]]:
    """Opens ``number`` endless streams; the first ones run, the others wait and get keep-alives."""
    with ExitStack() as stack:
        streams = []
        for index in range(number):
            stream = stack.enter_context(connect(url))
            stream.sendall(post(COMPLETIONS, {**ENDLESS, "prompt": prompt}))
            sign = b"data: " if index < MAX_RUNNING else b": keep-alive"
            assert read_answer(stream, until=sign).status == 200
            streams.append(stream)
        yield streams


def rejections(client: httpx.Client, limit: str) -> float:
    name = f'vllm:admission_rejections_total{{model_name="tiny",reason="{limit}"}}'
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.mark.slow
def test_beyond_the_limit_of_requests_all_that_was_accepted_goes_on(
    limited: Server, client: httpx.Client
) -> None:
    """Requests beyond the limit get 503 with Retry-After in both APIs; accepted ones are served in turn."""
    assert eventually(lambda: client.get("/load").json()["server_load"] == 0)
    before = rejections(client, "max_num_queued_reqs")
    with waiting_streams(limited.url, MAX_REQUESTS) as streams:
        for path, body in ((COMPLETIONS, SHORT), (MESSAGES, CHAT_TURN), ("/v1/chat/completions", CHAT_TURN)):
            answer = client.post(path, json=body)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            kind = "overloaded_error" if path == MESSAGES else "ServiceUnavailableError"
            assert answer.json()["error"]["type"] == kind
        assert rejections(client, "max_num_queued_reqs") == before + 3
        for stream in streams[:MAX_RUNNING]:
            stream.close()
        for stream in streams[MAX_RUNNING : 2 * MAX_RUNNING]:
            assert b"data: " in read_until(stream, b"data: ")
        assert client.post(COMPLETIONS, json={**SHORT, "n": 4, "temperature": 1}).status_code == 503
    assert eventually(lambda: client.post(COMPLETIONS, json=SHORT).status_code == 200)


@pytest.mark.parametrize(
    "body",
    [{**SHORT, "n": MAX_REQUESTS + 1, "temperature": 1}, {**SHORT, "prompt": ["a"] * (MAX_REQUESTS + 1)}],
)
def test_a_request_of_more_than_the_limit_is_served_alone(client: httpx.Client, body: dict[str, Any]) -> None:
    """A single request beyond the limit is served: a 503 would make its client retry for ever."""
    assert eventually(lambda: client.get("/load").json()["server_load"] == 0)
    answer = client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == MAX_REQUESTS + 1


def read_until(connection: socket.socket, sign: bytes) -> bytes:
    """Reads until a piece contains this."""
    data = b""
    while sign not in data:
        more = connection.recv(65536)
        assert more, data
        data += more
    return data


def test_beyond_the_limit_of_tokens_a_prompt_is_refused(limited: Server, client: httpx.Client) -> None:
    """Only waiting prompts count against the limit; a lone prompt is accepted however long it is."""
    assert eventually(lambda: client.get("/load").json()["server_load"] == 0)
    before = rejections(client, "max_num_queued_tokens")
    long = {"prompt": [5] * (MAX_TOKENS - 10), "max_tokens": 2}
    assert client.post(COMPLETIONS, json={**long, "prompt": [5] * (2 * MAX_TOKENS)}).status_code == 200
    with waiting_streams(limited.url, MAX_RUNNING + 1, prompt="a" * 40):
        answer = client.post(COMPLETIONS, json=long)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert str(MAX_TOKENS) in answer.json()["error"]["message"]
        assert rejections(client, "max_num_queued_tokens") == before + 1
    assert eventually(lambda: client.post(COMPLETIONS, json=long).status_code == 200)


# ---- streams ----


def test_a_stream_that_waits_sends_comments_that_clients_skip(limited: Server) -> None:
    """A waiting stream begins before its first token, with comments that clients skip."""
    with (
        openai.OpenAI(base_url=f"{limited.url}/v1", api_key="none", max_retries=0, timeout=30) as client,
        waiting_streams(limited.url, MAX_RUNNING) as running,
    ):
        stream = client.completions.create(
            model="tiny", prompt="a", max_tokens=3, stream=True, extra_body={"ignore_eos": True}
        )
        for connection in running:
            connection.close()
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"


@pytest.mark.slow
def test_a_client_that_leaves_gives_up_its_place(limited: Server, client: httpx.Client) -> None:
    """A disconnect in mid-stream or before the first token removes the request from the engine."""
    with waiting_streams(limited.url, MAX_RUNNING + 2):
        assert metric(client, "vllm:num_requests_running") == MAX_RUNNING
        assert metric(client, "vllm:num_requests_waiting") == 2
    assert eventually(lambda: client.get("/load").json()["server_load"] == 0)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        assert eventually(lambda name=name: metric(client, name) == 0)  # type: ignore[misc]


# ---- the end ----


@pytest.mark.slow
def test_a_server_that_drains_says_so_and_finishes_what_it_has(long_model: Path) -> None:
    """After SIGTERM a running request ends normally; health and new requests get 503 at once."""
    flags = ("--num-gpu-blocks-override", "2100", "--scheduling-policy", "fcfs", "--shutdown-grace-s", "60")
    with running_server(long_model, *flags) as server, connect(server.url) as running:
        running.sendall(post(COMPLETIONS, {**ENDLESS, "max_tokens": 2000}))
        read_answer(running, until=b"data: ")
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        refused = httpx.post(f"{server.url}{COMPLETIONS}", json=SHORT)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "shutting down" in refused.json()["error"]["message"]
        end = read_until(running, b"[DONE]")
        assert b'"finish_reason":"length"' in end
        assert server.wait(30) == 0


# ---- the command line ----


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-body-bytes", "0"),
        ("--max-num-queued-reqs", "0"),
        ("--max-connections", "-1"),
        ("--head-timeout-s", "0"),
        ("--request-timeout-s", "-1"),
        ("--sse-keep-alive-interval", "-1"),
    ],
)
def test_limits_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, value: str
) -> None:
    """Contradictory limits are refused in one sentence that names the option."""
    assert main(["serve", str(tmp_path), f"{flag}={value}"]) == 2
    assert f"argument {flag}: " in capsys.readouterr().err
