"""Promises about access: API keys in either form, TLS, allowed web origins and request time limits."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import trustme

from continuum.cli.main import main
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, running_server
from tests.api.test_service import eventually

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
KEY, ENVIRONMENT_KEY, ALICES_KEY, BOBS_KEY = "sk-flag", "sk-environment", "sk-alice", "sk-bob"
ORIGIN = "https://dashboard.example"
REQUEST_TIMEOUT_S = 3
SHORT = {"prompt": "a", "max_tokens": 2}
TURN = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
ENDLESS = {"max_tokens": 30_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def certificates(ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``server.pem`` (certificate and key), ``key.pem`` and ``ca.pem``."""
    folder = tmp_path_factory.mktemp("certificates")
    server = ca.issue_cert("127.0.0.1")
    server.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    server.private_key_pem.write_to_path(str(folder / "key.pem"))
    server.cert_chain_pems[0].write_to_path(str(folder / "certificate.pem"))
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("auth") / "server.log"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, certificates: Path, log: Path) -> Iterator[Server]:
    """HTTPS, keys from the command line and the environment, one allowed origin, a time limit per request."""
    model = make_model_folder(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=32768)
    flags = [
        *("--num-gpu-blocks-override", "2100"),
        *("--api-key", KEY, f"alice:{ALICES_KEY}", f"bob:{BOBS_KEY}"),
        *("--ssl-certfile", str(certificates / "certificate.pem")),
        *("--ssl-keyfile", str(certificates / "key.pem")),
        *("--allowed-origins", f'["{ORIGIN}"]'),
        *("--request-timeout-s", str(REQUEST_TIMEOUT_S)),
        "--no-dashboard",
    ]
    environment = {"CONTINUUM_API_KEY": f"{ENVIRONMENT_KEY}, sk-other"}
    with running_server(model, *flags, log=log, environment=environment) as running:
        yield running
        assert running.interrupt() == 0
    told = log.read_text()
    assert all(key not in told for key in (KEY, ENVIRONMENT_KEY, ALICES_KEY, "sk-wrong"))


@pytest.fixture(scope="module")
def trusting(certificates: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificates / "ca.pem"))


@pytest.fixture
def http(guarded: Server, trusting: ssl.SSLContext) -> Iterator[httpx.Client]:
    """A client without a key."""
    with httpx.Client(base_url=guarded.url, verify=trusting, timeout=30) as client:
        yield client


# ---- keys ----


@pytest.mark.parametrize("key", [KEY, ENVIRONMENT_KEY, "sk-other", ALICES_KEY])
def test_a_key_opens_in_either_form(http: httpx.Client, key: str) -> None:
    """A key is accepted in OpenAI's and in Anthropic's header; the case of "Bearer" does not matter."""
    for headers in (
        {"Authorization": f"Bearer {key}"},
        {"authorization": f"bearer {key}"},
        {"x-api-key": key},
    ):
        assert http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer sk-wrong"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": KEY},
        {"Authorization": "Bearer"},
        {"x-api-key": KEY[:-1]},
        {"x-api-key": f"{KEY}x"},
        {"x-api-key": f"alice:{ALICES_KEY}"},
        {"x-api-key": "sk-wröng"},
    ],
)
def test_anything_else_does_not(http: httpx.Client, headers: dict[str, str]) -> None:
    """Anything else gets 401 in the path's API, which says how to send a key; the body is not read."""
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    for path in (COMPLETIONS, "/tokenize", "/openapi.json", "/load", "/reset_prefix_cache", "/nothing"):
        answer = http.post(path, content=b"{", headers=encoded)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "AuthenticationError")
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.headers["x-request-id"]
    refused = http.post(MESSAGES, json=TURN, headers=encoded).json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "authentication_error")


def test_probes_need_no_key(http: httpx.Client) -> None:
    """Health, version and metrics need no key and reveal nothing about requests."""
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert http.get(path).status_code == 200


def test_the_dashboard_can_be_left_out(http: httpx.Client) -> None:
    """With ``--no-dashboard`` neither the page nor its feed is served."""
    headers = {"x-api-key": KEY}
    for path in ("/dashboard", "/dashboard/feed", "/dashboard/jobs/a"):
        assert http.get(path, headers=headers).status_code == 404


def test_the_libraries_raise_their_own_errors(guarded: Server, trusting: ssl.SSLContext) -> None:
    """Client libraries raise their own authentication errors, and work with a valid key."""
    with openai.OpenAI(
        base_url=f"{guarded.url}/v1",
        api_key="sk-wrong",
        http_client=openai.DefaultHttpxClient(verify=trusting),
    ) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert [model.id for model in client.with_options(api_key=KEY).models.list()] == ["tiny"]
    with anthropic.Anthropic(
        base_url=guarded.url,
        api_key="sk-wrong",
        http_client=anthropic.DefaultHttpxClient(verify=trusting),
    ) as claude:
        for key, error in (("sk-wrong", anthropic.AuthenticationError), (KEY, None)):
            with pytest.raises(error) if error else nullcontext():
                answer = claude.with_options(api_key=key).messages.create(
                    model="tiny", max_tokens=2, messages=[{"role": "user", "content": "a"}]
                )
                assert answer.usage.output_tokens <= 2


def test_a_named_key_is_a_tenant(http: httpx.Client) -> None:
    """A named key decides the job's tenant, whatever the request says. With an unnamed key the request's
    ``user`` does, and never counts as the owner of a key."""
    body = {**TURN, "user": "bob"}
    headers = {"x-continuum-owner": "eve"}
    for key, job_id in ((ALICES_KEY, "a"), (KEY, "b")):
        answer = http.post(CHAT, json={**body, "job_id": job_id}, headers={**headers, "x-api-key": key})
        assert answer.status_code == 200
    for job_id, tenant in (("alice:a", "alice"), ("b", "user:bob")):
        assert http.get(f"/v1/jobs/{job_id}", headers={"x-api-key": KEY}).json()["tenant"] == tenant


def test_jobs_of_two_owners_are_two_jobs(http: httpx.Client) -> None:
    """Two owners may both name a job "main": neither can continue, see or end the other's."""
    alice, bob = {"x-api-key": ALICES_KEY}, {"x-api-key": BOBS_KEY}

    def turn(headers: dict[str, str], **more: object) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": "a story " * 20}], "max_tokens": 4, "job_id": "main"}
        answer = http.post(CHAT, json={**body, **more}, headers=headers).json()
        receipt: dict[str, Any] = answer["usage"]["receipt"]
        return receipt

    def jobs(headers: dict[str, str]) -> set[str]:
        return {job["id"] for job in http.get("/v1/jobs", headers=headers).json()["data"]}

    assert (turn(alice)["job_id"], turn(bob)["turn"]) == ("alice:main", 1)
    assert "bob:main" not in jobs(alice)
    assert {"alice:main", "bob:main"} <= jobs({"x-api-key": KEY})
    inferred = turn(alice, job_id=None)["job_id"]
    for job_id in ("alice:main", inferred):
        assert http.get(f"/v1/jobs/{job_id}", headers=alice).json()["id"] == job_id
        assert http.post(f"/v1/jobs/{job_id}/finish", headers=bob).status_code == 404
    assert turn(bob, is_last_step=True)["job_id"] == "bob:main"
    assert http.get("/v1/jobs/main", headers=bob).status_code == 404
    assert http.get("/v1/jobs/main", headers=alice).json()["turns"] == 1


def test_the_document_says_how_a_key_is_shown(http: httpx.Client) -> None:
    """The OpenAPI document describes how to send a key, so that generated tools request one."""
    document = http.get("/openapi.json", headers={"x-api-key": KEY}).json()
    assert document["security"] == [{"bearer": []}, {"header": []}]


# ---- TLS ----


def test_plain_http_gets_nothing(guarded: Server) -> None:
    """An HTTPS port answers no plain HTTP request."""
    with pytest.raises(httpx.HTTPError):
        httpx.get(guarded.url.replace("https:", "http:") + "/health")


def test_a_stranger_is_not_trusted(guarded: Server) -> None:
    """A client that does not know the certificate's authority refuses the connection."""
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{guarded.url}/health")


def test_a_client_that_never_shakes_hands_stops_nobody(guarded: Server, http: httpx.Client) -> None:
    """A connection without a TLS handshake blocks no other client."""
    host, port = guarded.url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port))):
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--ssl-certfile", "nowhere.pem"], "ssl_certfile"),
        (["--ssl-keyfile", "key.pem"], "ssl_certfile"),
        (["--ssl-certfile", "ca.pem", "--ssl-keyfile", "key.pem"], "ssl_certfile"),
        (["--ssl-certfile", "server.pem", "--ssl-cert-reqs", "2"], "ssl_ca_certs"),
        (["--ssl-certfile", "server.pem", "--ssl-ca-certs", "key.pem"], "ssl_ca_certs"),
        (["--api-key", " "], "api_key"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    capsys: pytest.CaptureFixture[str], certificates: Path, tmp_path: Path, flags: list[str], told: str
) -> None:
    """Unworkable settings are refused in one sentence, before the model is loaded."""
    arguments = [str(certificates / part) if part.endswith(".pem") else part for part in flags]
    assert main(["serve", str(tmp_path / "no-model"), "--port", "0", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert told in line


# ---- web pages ----


def test_only_a_page_that_is_named_may_ask(http: httpx.Client) -> None:
    """A named page's preflight needs no key; other origins are refused."""
    asking = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    allowed = http.options(CHAT, headers=asking)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
    refused = http.options(CHAT, headers={**asking, "Origin": "https://evil.example"})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    answer = http.get("/v1/models", headers={"Origin": ORIGIN, "x-api-key": KEY})
    assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_no_page_may_ask_unless_told(server: Server) -> None:
    """CORS is off by default, and a foreign page's request without a preflight is refused."""
    answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers
    for path in (COMPLETIONS, "/reset_prefix_cache"):
        refused = httpx.post(server.url + path, json=SHORT, headers={"Origin": ORIGIN})
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "PermissionDeniedError")
        assert httpx.post(server.url + path, json=SHORT, headers={"Origin": server.url}).status_code == 200


# ---- time ----


@pytest.mark.slow
def test_a_request_that_takes_too_long_is_ended(http: httpx.Client) -> None:
    """A timeout gives 504 in the path's API, or an error at the end of a stream; the engine stops the
    request."""
    headers = {"x-api-key": KEY}
    bodies = (
        (COMPLETIONS, {"prompt": "a", **ENDLESS}),
        (MESSAGES, {**TURN, **ENDLESS}),
        (COMPLETIONS, {"prompt": "a", **ENDLESS, "stream": True}),
    )
    with ThreadPoolExecutor(len(bodies)) as clients:
        whole, message, streamed = clients.map(
            lambda asked: http.post(asked[0], json=asked[1], headers=headers), bodies
        )
    assert (whole.status_code, whole.json()["error"]["type"]) == (504, "GatewayTimeoutError")
    assert "request_timeout_s" in whole.json()["error"]["message"]
    assert (message.status_code, message.json()["error"]["type"]) == (504, "timeout_error")
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == 504
    assert len(events) > 10
    assert eventually(lambda: http.get("/load", headers=headers).json()["server_load"] == 0)
