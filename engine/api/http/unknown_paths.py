"""Error messages for unknown paths and methods, with the path that may have been meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from engine.api.http.head import IS_HEAD

MAX_SHOWN_CHARS = 200
_NOT_HERE = {
    "/audio": "This server has no endpoints for audio.",
    "/images": "This server has no image generation.",
    "/collective_rpc": "The workers run no code of clients; POST /update_weights loads new weights.",
}


def unknown_path_message(scope: Scope, routes: Iterable[APIRoute]) -> str:
    """Returns the message for a path without an endpoint."""
    path = scope["path"]
    routes = list(routes)
    message = f"There is no {_method(scope)} {_shown(path)} here."
    for part, why in _NOT_HERE.items():
        if part in path:
            return f"{message} {why}"
    near = _nearest(path, scope, routes)
    return message if near is None else f"{message} Did you mean {near}?"


def allowed_methods(scope: Scope, routes: Iterable[APIRoute]) -> list[str]:
    """The methods that the path supports; HEAD if GET is one of them."""
    methods = {
        method
        for route in routes
        if route.matches(scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def wrong_method_message(scope: Scope, allowed: Iterable[str]) -> str:
    """Returns the message for a method that the path does not support."""
    return f"{_shown(scope['path'])} does not take {_method(scope)}; it takes {', '.join(allowed)}."


def _method(scope: Scope) -> str:
    return "HEAD" if scope.get(IS_HEAD) else str(scope["method"])


def _nearest(path: str, scope: Scope, routes: list[APIRoute]) -> str | None:
    shorter = path
    while "/v1/v1" in shorter:
        shorter = shorter.replace("/v1/v1", "/v1")
    shorter = shorter.rstrip("/") or "/"
    for guess in (shorter, f"/v1{shorter}", shorter.removeprefix("/v1")):
        if guess != path and any(
            route.matches({**scope, "path": guess})[0] is not Match.NONE for route in routes
        ):
            return _shown(guess)
    known = [route.path for route in routes if not route.param_convertors]
    close = get_close_matches(path[:MAX_SHOWN_CHARS], known, n=1)
    return close[0] if close else None


def _shown(path: str) -> str:
    """The requested path, without control characters."""
    return "".join(char if char.isprintable() else "?" for char in path[:MAX_SHOWN_CHARS])
