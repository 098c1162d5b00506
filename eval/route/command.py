"""``continuum route``: an HTTP proxy for whole servers that sends a job's turns to the same server."""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from continuum.routing.catalog import DEFAULT_ROUTER, ROUTERS, router_factory
from engine.api.http.access_flags import API_KEY_VARIABLE, add_tls_flags, api_keys, tls_config
from eval.errors import UsageError
from eval.say import say

SERVER_KEY_VARIABLE = "CONTINUUM_SERVER_API_KEY"
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
    keys = parser.add_argument_group("keys")
    keys.add_argument(
        "--api-key",
        action="extend",
        nargs="+",
        metavar="KEY",
        help="Keys that clients must send, as bearer token or x-api-key; prefer the environment variable "
        f"{API_KEY_VARIABLE} (default: whatever clients send goes to the servers, which check it)",
    )
    keys.add_argument(
        "--server-api-key",
        metavar="KEY",
        help=f"Key for the servers, in place of the clients'; prefer {SERVER_KEY_VARIABLE}",
    )
    tls = parser.add_argument_group("TLS")
    add_tls_flags(tls)
    tls.add_argument(
        "--server-ca-certs",
        metavar="PATH",
        help="CA certificates that the servers' certificates must be signed by (default: the system's)",
    )


def run(args: argparse.Namespace) -> int:
    """Serves until stopped. UsageError for an invalid address, ConfigError for keys or certificates."""
    for url in args.urls:
        _check(url)
    given = api_keys(args)
    _check_keys(given)
    server_key = _server_key(args, given)
    tls = tls_config(args)
    verify = _server_certificates(args.server_ca_certs)
    if not 0 < args.port < 65_536:
        raise UsageError(f"--port must be from 1 to 65535, got {args.port}.")

    import uvicorn

    from engine.api.config import ServerConfig
    from engine.api.http.auth import ApiKeys, AuthMiddleware
    from engine.api.http.http_config import http_config
    from engine.api.http.middleware import BodyLimitMiddleware
    from eval.route.proxy import RouteApp

    config = ServerConfig(served_model_names=("route",), host=args.host, port=args.port, tls=tls)
    limits = config.limits
    keys = ApiKeys(given)
    route = RouteApp(args.urls, router_factory(args.router), server_key=server_key, verify=verify)
    limited = BodyLimitMiddleware(route.app, max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s)
    app = AuthMiddleware(limited, keys)
    scheme = "http" if tls.certfile is None else "https"
    say(f"Routing to {len(args.urls)} servers at {scheme}://{args.host}:{args.port}")
    served = http_config(app, config, keys, shutdown_timeout_s=SHUTDOWN_S, backlog=BACKLOG, lifespan="on")
    served.host = args.host
    served.port = args.port
    server = uvicorn.Server(served)
    with suppress(KeyboardInterrupt):  # uvicorn has shut down cleanly and raises the signal again
        server.run()
    return 0 if server.started else 1


def _check_keys(keys: Sequence[str]) -> None:
    """UsageError for keys of a route that are malformed, or that have owners."""
    from engine.api.http.auth import ApiKeys, fault_of_keys

    fault = fault_of_keys(keys)
    if fault is None and ApiKeys(keys).names:
        fault = (
            "--api-key: a route's keys have no names, as servers would not know the owners; give named keys "
            "to the servers, and none to the route, which then passes the clients' keys on."
        )
    if fault is not None:
        raise UsageError(fault)


def _server_key(args: argparse.Namespace, keys: Sequence[str]) -> str | None:
    """The key for the servers. UsageError if whoever reaches the route could use it."""
    from engine.api.http.hosts import is_loopback

    key: str | None = args.server_api_key or os.environ.get(SERVER_KEY_VARIABLE)
    if key is not None and not keys and not is_loopback(args.host):
        raise UsageError("--server-api-key needs --api-key, or anyone who reaches the route could use it.")
    if keys and key is None:
        raise UsageError(
            "--api-key needs --server-api-key: the clients' keys are the route's, and are not passed on."
        )
    if key is not None and not (key.isascii() and key.isprintable()):
        raise UsageError("--server-api-key must be printable ASCII.")
    return key


def _server_certificates(path: str | None) -> ssl.SSLContext | bool:
    """How the servers' certificates are checked. UsageError if the file cannot be used."""
    if path is None:
        return True
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise UsageError(f"--server-ca-certs: {path} cannot be used: {error}.") from error


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise UsageError(f"URL must be that of a server, such as http://10.0.0.1:8000, got {url!r}.")
