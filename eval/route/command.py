"""``continuum route``: an HTTP proxy for whole servers that sends a job's turns to the same server."""

from __future__ import annotations

import argparse
from contextlib import suppress
from urllib.parse import urlsplit

from continuum.routing.catalog import DEFAULT_ROUTER, ROUTERS, router_factory
from eval.errors import UsageError
from eval.say import say

SHUTDOWN_S = 10.0
BACKLOG = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum route``."""
    parser.usage = "continuum route URL [URL ...] [--flag VALUE ...]"
    parser.add_argument(
        "urls",
        nargs="+",
        metavar="URL",
        help="Address of a server, ours or vLLM's, such as http://10.0.0.1:8000",
    )
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, metavar="PORT", help="Port (default: %(default)s)")
    parser.add_argument(
        "--router",
        choices=tuple(ROUTERS),
        default=DEFAULT_ROUTER,
        help="Routing of requests to servers; jobs: to the server of the job, or the one that has most of "
        "the prompt cached; least-loaded: as V1's balancer (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Serves until stopped. UsageError for an invalid address."""
    for url in args.urls:
        _check(url)
    if not 0 < args.port < 65_536:
        raise UsageError(f"--port must be from 1 to 65535, got {args.port}.")

    import uvicorn

    from engine.api.config import ServerConfig
    from engine.api.http.auth import ApiKeys
    from engine.api.http.http_config import http_config
    from engine.api.http.middleware import BodyLimitMiddleware
    from eval.route.proxy import RouteApp

    config = ServerConfig(served_model_names=("route",), host=args.host, port=args.port)
    limits = config.limits
    app = BodyLimitMiddleware(
        RouteApp(args.urls, router_factory(args.router)).app,
        max_bytes=limits.max_body_bytes,
        timeout_s=limits.body_timeout_s,
    )
    say(f"Routing to {len(args.urls)} servers at http://{args.host}:{args.port}")
    served = http_config(
        app, config, ApiKeys(()), shutdown_timeout_s=SHUTDOWN_S, backlog=BACKLOG, lifespan="on"
    )
    served.host = args.host
    served.port = args.port
    server = uvicorn.Server(served)
    with suppress(KeyboardInterrupt):  # uvicorn has shut down cleanly and raises the signal again
        server.run()
    return 0 if server.started else 1


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise UsageError(f"URL must be that of a server, such as http://10.0.0.1:8000, got {url!r}.")
