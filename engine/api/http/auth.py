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

OPEN_PATHS = frozenset(("/health", "/ping", "/version", "/metrics", "/dashboard"))
"""What probes, scrapers and browsers ask without a key: nothing of any request's content is told there. (The
page of /dashboard is the same for everybody; what it shows it asks for with its reader's key.)"""
TENANT_HEADER = "x-continuum-tenant"
"""Whose key it was, where the key names somebody. What a client says here itself is taken away."""

_NAMED_KEY = re.compile(r"([A-Za-z0-9_.-]{1,64}):(.+)", re.DOTALL)


class ApiKeys:
    """The keys that open the server; ``NAME:KEY`` also says whose requests those are."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._tenants: list[tuple[bytes, str | None]] = []
        for key in keys:
            name, secret = _named(key)
            self._tenants.append((_digest(secret.encode()), name))

    def find(self, presented: bytes) -> tuple[bool, str | None]:
        """Whether this is one of them, and whose. Every key is looked at, whichever fits."""
        digest = _digest(presented)
        found, tenant = False, None
        for known, name in self._tenants:
            if compare_digest(known, digest):
                found, tenant = True, name
        return found, tenant


def _named(key: str) -> tuple[str | None, str]:
    parts = _NAMED_KEY.fullmatch(key)
    return (parts[1], parts[2]) if parts else (None, key)


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


class AuthMiddleware:
    """401 for requests without a key that fits, as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        found, tenant = self._find(Headers(scope=scope))
        if not found:
            await refusal(_unauthorized(), scope)(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        del headers[TENANT_HEADER]
        if tenant is not None:
            headers[TENANT_HEADER] = tenant
        await self._app(scope, receive, send)

    def _find(self, headers: Headers) -> tuple[bool, str | None]:
        """Clients that were set up for another service may send both; one that fits is enough."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        presented = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            presented.append(bearer.strip())
        for key in filter(None, presented):
            found, tenant = self._keys.find(key.encode("latin-1"))
            if found:
                return found, tenant
        return False, None


def _unauthorized() -> HTTPException:
    return HTTPException(
        401,
        "This server needs an API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        {"WWW-Authenticate": 'Bearer realm="continuum"'},
    )
