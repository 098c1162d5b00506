"""Who may ask: API keys, compared without telling by the time it takes how much of one was right.

Keys are kept as digests only, and never logged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.api.http.middleware import refusal

OPEN_PATHS = frozenset(("/", "/health", "/ping", "/version", "/metrics", "/dashboard"))
"""What probes, scrapers and browsers ask without a key: nothing of any request's content is told there. (The
page of /dashboard is the same for everybody; what it shows it asks for with its reader's key.)"""
OWNER_HEADER = "x-continuum-owner"
"""Whose key it was: its name; empty for one without a name beside others that have one; not there where no
key has a name. What a client says here itself is taken away, whether there are keys or not."""

MAX_SHOWN_NAME_CHARS = 40

KEY_NAME = r"[A-Za-z0-9_.-]{1,64}"
_NAMED_KEY = re.compile(rf"({KEY_NAME}):(.+)", re.DOTALL)


class ApiKeys:
    """The keys that open the server; ``NAME:KEY`` also says whose requests those are."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._owners: list[tuple[bytes, str | None]] = []
        for key in keys:
            name, secret = _named(key)
            self._owners.append((_digest(secret.encode()), name))
        self.names = tuple(sorted({name for _, name in self._owners if name is not None}))
        """Whose they are; empty if no key says so."""

    def find(self, presented: bytes) -> tuple[bool, str | None]:
        """Whether this is one of them, and whose. Every key is looked at, whichever fits."""
        digest = _digest(presented)
        found, owner = False, None
        for known, name in self._owners:
            if compare_digest(known, digest):
                found, owner = True, name
        return found, owner

    def find_shown(self, headers: Headers) -> tuple[bool, str | None]:
        """Clients that were set up for another service may send both; one that fits is enough."""
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
        """Of a request's headers, names in lower case; empty for a key without a name, and for none."""
        return self.find_shown(Headers(raw=list(headers)))[1] or ""


def fault_of_keys(keys: Sequence[str]) -> str | None:
    """What is wrong with keys that an operator gave, in a sentence without any secret; None if nothing is."""
    owners: dict[str, str | None] = {}
    for key in keys:
        name, secret = _named(key)
        if not key.rpartition(":")[2].strip():
            return "api_key must not be empty."
        if name is None and ":" in key:
            before = ascii(key.partition(":")[0][:MAX_SHOWN_NAME_CHARS])
            return (
                f"api_key: what stands before the colon, {before}, is no name; a name has up to 64 letters, "
                "digits, dots, dashes and underscores, and a key without one has no colon."
            )
        if secret in owners:
            whose = [each or "a key without a name" for each in (owners[secret], name)]
            return f"api_key: {whose[0]} and {whose[1]} have the same secret; whose request would it be?"
        owners[secret] = name
    return None


def _named(key: str) -> tuple[str | None, str]:
    parts = _NAMED_KEY.fullmatch(key)
    return (parts[1], parts[2]) if parts else (None, key)


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


class AuthMiddleware:
    """401 for requests without a key that fits, as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``; those
    that come through say whose key it was. ``keys`` is None: everybody may ask, and nobody owns anything."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        if OWNER_HEADER in headers:
            del headers[OWNER_HEADER]
        if self._keys is not None and scope["path"] not in OPEN_PATHS:
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
