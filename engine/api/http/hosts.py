"""Protection against DNS rebinding: requests to a foreign host name are refused.

A browser takes a page whose name was rebound to this machine for a page of this server, and lets it send and
read. Its ``Host`` is still that name, which is never intended for a server that only this machine reaches.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.api.http.middleware import refusal

ANY = "*"
LOCAL_DOMAINS = (".localhost", ".internal")
"""Domains that no one can register (RFC 6761; ICANN for private use), such as
``host.docker.internal``."""


def is_loopback(host: str | None) -> bool:
    """Whether the address can be reached only from its own machine."""
    if host is None:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return _is_local(host)


class HostMiddleware:
    """Answers 403 to a foreign host name. Addresses, single-label names and this machine's own names always
    pass: no foreign page can have them."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """``allowed``: additional names; ``*.example.org`` matches all of its subdomains."""
        self._app = app
        self._own = socket.gethostname().lower()
        self._names = frozenset(name.lower().rstrip(".") for name in allowed if not name.startswith("*."))
        self._suffixes = tuple(name.lower().rstrip(".")[1:] for name in allowed if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._may_be_asked(_name(Headers(scope=scope).get("host", ""))):
            await self._app(scope, receive, send)
            return
        error = HTTPException(
            403, "This server does not accept this Host; --allowed-hosts lists the accepted ones."
        )
        await refusal(error, scope)(scope, receive, send)

    def _may_be_asked(self, name: str) -> bool:
        return (
            _is_local(name)
            or _is_address(name)
            or name in self._names
            or name in (self._own, f"{self._own}.local")
            or name.endswith(self._suffixes)
        )


def _name(host: str) -> str:
    """The host name without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower().rstrip(".")


def _is_local(name: str) -> bool:
    return "." not in name or name.endswith(LOCAL_DOMAINS)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
