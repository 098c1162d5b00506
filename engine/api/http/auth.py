"""Authentication by API keys, compared in constant time. Keys are kept as digests only, and never
logged."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.api.http.middleware import refusal

OPEN_PATHS = frozenset(("/", "/health", "/ping", "/version", "/metrics", "/dashboard"))
"""Paths that probes, scrapers and browsers read without a key: they disclose no content of requests. (The
page of /dashboard is static; it fetches its data with the reader's key.)"""
OWNER_HEADER = "x-continuum-owner"
"""Internal header with the owner of the request's key: empty for a key without a name, absent
where no key has one. A client's own value is always removed."""

MAX_SHOWN_NAME_CHARS = 40

KEY_NAME = r"[A-Za-z0-9_.-]{1,64}"
_NAMED_KEY = re.compile(rf"({KEY_NAME}):(.+)", re.DOTALL)


class ApiKeys:
    """The server's API keys; ``NAME:KEY`` also names the owner of its requests."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._given = [(_digest(secret.encode()), name) for name, secret in map(_named, keys)]
        self.use({})

    def use(self, named: Mapping[str, bytes]) -> None:
        """Takes these keys besides those given at first, in place of earlier ones: digests by name."""
        self._owners = [*self._given, *((digest, name) for name, digest in named.items())]
        self.names = tuple(sorted({name for _, name in self._owners if name is not None}))
        """The owners of the keys; empty if no key has a name."""

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return bool(self._owners)

    def has(self, digest: bytes) -> bool:
        """Whether a key has this digest."""
        return any(known == digest for known, _ in self._owners)

    def find(self, presented: bytes) -> tuple[bool, str | None]:
        """Returns whether the key is valid, and its owner. All keys are compared, whichever matches."""
        digest = _digest(presented)
        found = False
        owner = None
        for known, name in self._owners:
            if compare_digest(known, digest):
                found = True
                owner = name
        return found, owner

    def find_shown(self, headers: Headers) -> tuple[bool, str | None]:
        """Checks both headers, since clients set up for another service may send both: one valid
        key is enough."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        presented = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            presented.append(bearer.strip())
        for key in filter(None, presented):
            found, owner = self.find(key.encode("latin-1"))
            if found:
                return found, owner
        return False, None

    def owner_shown(self, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """The owner of the key in a request's lower-case headers; empty for a key without a name, or without
        a key."""
        return self.find_shown(Headers(raw=list(headers)))[1] or ""


def fault_of_keys(keys: Sequence[str]) -> str | None:
    """The error in the operator's keys, without any secret; None if they are valid."""
    owners: dict[str, str | None] = {}
    for key in keys:
        name, secret = _named(key)
        if not key.rpartition(":")[2].strip():
            return "api_key must not be empty."
        if name is None and ":" in key:
            before = ascii(key.partition(":")[0][:MAX_SHOWN_NAME_CHARS])
            return (
                f"api_key: the part before the colon, {before}, is not a valid name; a name has up to 64 "
                "letters, digits, dots, dashes and underscores; a key without a name must not have a colon."
            )
        if secret in owners:
            whose = [each or "a key without a name" for each in (owners[secret], name)]
            return f"api_key: {whose[0]} and {whose[1]} have the same secret; each needs its own."
        owners[secret] = name
    return None


def _named(key: str) -> tuple[str | None, str]:
    parts = _NAMED_KEY.fullmatch(key)
    return (parts[1], parts[2]) if parts else (None, key)


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


class AuthMiddleware:
    """Answers 401 without a valid key, as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``;
    adds the key's owner to the others. Without ``keys`` everyone has access and nothing has an owner."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        if OWNER_HEADER in headers:
            del headers[OWNER_HEADER]
        if self._keys and scope["path"] not in OPEN_PATHS:
            found, owner = self._keys.find_shown(headers)
            if not found:
                await refusal(_unauthorized(), scope)(scope, receive, send)
                return
            if self._keys.names:
                headers[OWNER_HEADER] = owner or ""
        await self._app(scope, receive, send)


def _unauthorized() -> HTTPException:
    return HTTPException(
        401,
        "This server needs an API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        {"WWW-Authenticate": 'Bearer realm="continuum"'},
    )
