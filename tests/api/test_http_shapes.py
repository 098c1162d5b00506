"""Promises about unusual HTTP requests: upgrade offers, compressed bodies, any host or path, half-closed
connections."""

from __future__ import annotations

import gzip
import json
import re
import socket
import sys
import zlib
from collections.abc import Callable
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest

from engine.api.config import AccessConfig, ServerConfig
from engine.errors import ConfigError
from tests.api.server import Server
from tests.api.wire import connect, post, post_head, read_answer

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BODY = json.dumps(HELLO).encode()
OFFER = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAA")


def deflated(body: bytes) -> bytes:
    """Compresses to raw deflate, without the zlib header that the standard requires."""
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


def ask(server: Server, *pieces: bytes) -> tuple[int, bytes]:
    with connect(server.url) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = read_answer(connection)
    return answer.status, answer.body


# ---- an offer to speak another protocol ----


@pytest.mark.parametrize("cut", [0, 1, 30, len(BODY)])
def test_an_offer_of_another_protocol_changes_nothing(server: Server, cut: int) -> None:
    """An HTTP/2 upgrade offer, as Java's client sends, is ignored; the body is read, however it is cut."""
    head = post_head(CHAT, *OFFER, f"Content-Length: {len(BODY)}")
    assert ask(server, head + BODY[:cut], BODY[cut:])[0] == 200


def test_after_an_offer_a_body_may_come_in_chunks_and_others_follow(server: Server) -> None:
    """After an offer a chunked body and further requests are read; a malformed chunk is refused."""
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert ask(server, post_head(CHAT, *OFFER, "Transfer-Encoding: chunked") + chunks)[0] == 200
    assert (
        ask(server, b"\r\n".join((b"GET /health HTTP/1.1", b"Host: x", *map(str.encode, OFFER), b"", b"")))[0]
        == 200
    )
    assert ask(server, post_head(CHAT, *OFFER, "Transfer-Encoding: chunked") + b"zz\r\n")[0] == 400


# ---- compressed bodies ----

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:]),
    "deflate": zlib.compress,
    "Deflate": deflated,
    "zstd": zstd.compress,
}


@pytest.mark.parametrize("encoding", PACKERS)
def test_packed_bodies_are_read(http: httpx.Client, encoding: str) -> None:
    """Bodies are read in each content encoding that clients use, in one member or several."""
    answer = http.post(CHAT, content=PACKERS[encoding](BODY), headers={"Content-Encoding": encoding})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_a_small_body_that_unpacks_to_a_huge_one_is_refused(
    http: httpx.Client, path: str, encoding: str
) -> None:
    """Decompression stops at the body limit, and the data is not kept."""
    bomb = PACKERS[encoding](b'{"a": "' + bytes(64 * 2**20))
    assert len(bomb) < 2**20
    answer = http.post(path, content=bomb, headers={"Content-Encoding": encoding})
    assert answer.status_code == 413
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", BODY, 400),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], 400),
        ("gzip", gzip.compress(BODY, mtime=0) + b"more", 400),
        ("zstd", zstd.compress(BODY)[:-3], 400),
        ("deflate", b"", 400),
        ("br", BODY, 415),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY, mtime=0), mtime=0), 415),
        ("identity", BODY, 200),
    ],
)
def test_what_is_not_packed_as_it_says_is_refused(
    http: httpx.Client, encoding: str, body: bytes, status: int
) -> None:
    """A truncated, mislabeled or unknown encoding is refused, never taken for an empty body."""
    answer = http.post(CHAT, content=body, headers={"Content-Encoding": encoding})
    assert answer.status_code == status, answer.text


# ---- probes, names of paths ----


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/version", "/metrics", "/dashboard/feed"])
def test_head_is_answered_as_get_without_content(http: httpx.Client, path: str) -> None:
    """HEAD is answered like GET without a body, as clients probe with it; endless streams included."""
    answer = http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_the_root_says_what_this_is(http: httpx.Client) -> None:
    """The root path returns the server's name and where its API is."""
    told = http.get("/").json()
    assert told["name"] == "continuum"
    paths = http.get("/openapi.json").json()["paths"]
    assert {*told["endpoints"].values()} - {"/openapi.json", "/dashboard"} <= paths.keys()
    page = http.get("/", headers={"accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    for link in re.findall(r'href="([^"]+)"', page.text):
        assert http.get(link, follow_redirects=True).status_code == 200, link


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/v1/v1/messages", "/v1/messages"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/embeddings", "/v1/embeddings"),
        ("/v1/audio/speech", "audio"),
        ("/collective_rpc", "POST /update_weights loads new weights"),
        ("/nothing/like/it", None),
    ],
)
def test_an_unknown_path_is_named_beside_what_may_have_been_meant(
    http: httpx.Client, path: str, near: str | None
) -> None:
    """An error for an unknown path suggests the right one, e.g. for a base URL with /v1 twice or missing."""
    answer = http.post(path, json={})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404
    assert path in message
    assert ("Did you mean" in message) == bool(near and near.startswith("/"))
    assert (near or "here") in message


def test_another_method_is_told_which_there_are(http: httpx.Client) -> None:
    """A wrong method gets the allowed ones in the message and in the ``Allow`` header."""
    answer = http.put("/v1/conversations", json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "takes POST" in answer.json()["error"]["message"]


def test_a_byte_order_mark_is_passed_over(http: httpx.Client) -> None:
    """A UTF-8 byte order mark, as Windows writes it, is skipped."""
    assert http.post(CHAT, content=b"\xef\xbb\xbf" + BODY).status_code == 200


# ---- Host ----


@pytest.mark.parametrize("hosts", [[], ["a", "b"], ["a", "a"]])
def test_a_request_has_one_host(server: Server, hosts: list[str]) -> None:
    """A request with no Host or with two is refused (RFC 9112, 3.2)."""
    lines = ["GET /health HTTP/1.1", *(f"Host: {host}" for host in hosts), "", ""]
    assert ask(server, "\r\n".join(lines).encode())[0] == 400
    assert ask(server, b"GET /health HTTP/1.0\r\n\r\n")[0] == 200


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]:80", "10.1.2.3:9", "localhost", "box:8000", "host.docker.internal"]
)
def test_addresses_and_local_names_are_answered(http: httpx.Client, host: str) -> None:
    """Addresses and local names are accepted as Host: no foreign page can have such a name."""
    assert http.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example."]
)
def test_a_page_whose_name_was_pointed_here_gets_nothing(http: httpx.Client, host: str) -> None:
    """A page whose name was rebound to this address (DNS rebinding) can neither read nor send."""
    for answer in (
        http.get("/v1/jobs", headers={"Host": host}),
        http.post(CHAT, json=HELLO, headers={"Host": host, "Origin": f"http://{host}"}),
    ):
        assert answer.status_code == 403
        assert "--allowed-hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "keys", "allowed", "asked"),
    [
        ("127.0.0.1", (), (), ()),
        ("localhost", (), (), ()),
        ("127.0.0.1", ("secret",), (), None),
        ("127.0.0.1", (), ("*",), None),
        (None, (), (), None),
        ("0.0.0.0", (), ("api.example.org",), ("api.example.org",)),
    ],
)
def test_when_names_are_asked_for(
    host: str | None, keys: tuple[str, ...], allowed: tuple[str, ...], asked: tuple[str, ...] | None
) -> None:
    """Host names are checked on a keyless server that only this machine reaches, and where the operator says
    so."""
    access = AccessConfig(api_keys=keys, allowed_hosts=allowed)
    assert ServerConfig(served_model_names=("m",), host=host, access=access).hosts == asked


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (("al ice:SECRET",), "'al ice'"),
        ((":SECRET",), "''"),
        (("alice:",), "must not be empty"),
        (("alice:SECRET", "bob:SECRET"), "alice and bob"),
        (("SECRET", "bob:SECRET"), "a key without a name and bob"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused(keys: tuple[str, ...], told: str) -> None:
    """Implausible keys are refused in a sentence that contains no secret."""
    with pytest.raises(ConfigError) as refused:
        AccessConfig(api_keys=keys)
    assert told in str(refused.value)
    assert "SECRET" not in str(refused.value)


# ---- half-closed connections ----


@pytest.mark.parametrize("stream", [False, True])
def test_who_has_said_all_still_gets_the_answer(server: Server, stream: bool) -> None:
    """A client that half-closes after its request still gets the answer."""
    body = {"prompt": "a", "max_tokens": 150, "ignore_eos": True, "stream": stream, "temperature": 0}
    with connect(server.url) as connection:
        connection.sendall(post("/v1/completions", body))
        connection.shutdown(socket.SHUT_WR)
        answer = HTTPResponse(connection)
        answer.begin()
        content = answer.read()
        assert answer.status == 200
        # The head of a stream may be on its way before the half close is seen.
        assert stream or answer.headers["connection"] == "close"
        assert connection.recv(1) == b""  # no further request can come: the server ends its side, too
    assert content.count(b'"finish_reason":"length"') == 1
    assert not stream or content.endswith(b"data: [DONE]\n\n")


def test_who_says_half_and_ends_has_gone(server: Server) -> None:
    """A client that half-closes in the middle of a body is treated as gone."""
    with connect(server.url) as connection:
        connection.sendall(post_head(CHAT, "Content-Length: 1000") + b"{")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1000) == b""
