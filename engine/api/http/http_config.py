"""Configuration of uvicorn: the parser, limits of connections, TLS.

httptools parses requests in half the time of h11; ``connection_guard`` sets the limits of a request's head
that h11 would set.
"""

from __future__ import annotations

import resource
from typing import Literal, cast

import uvicorn
from starlette.types import ASGIApp

from engine.api.config import ServerConfig
from engine.api.http.auth import ApiKeys
from engine.api.http.connection_guard import ConnectionGuard, GuardedProtocol

SPARE_FILES = 256
"""Open files that a process needs besides its connections."""


def http_config(
    app: ASGIApp,
    config: ServerConfig,
    keys: ApiKeys,
    *,
    shutdown_timeout_s: float,
    backlog: int,
    lifespan: Literal["on", "off"] = "off",
) -> uvicorn.Config:
    """uvicorn's configuration for this application. ``backlog``: connections that may wait to be
    accepted."""
    limits = config.limits
    tls = config.tls
    owner_of = keys.owner_shown if keys.names else None
    guard = ConnectionGuard(limits.max_connections, limits.head_timeout_s, owner_of)
    return uvicorn.Config(
        app,
        http=cast(type[GuardedProtocol], guard.protocol),
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the client's address is not used, and reading it costs time
        lifespan=lifespan,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=round(shutdown_timeout_s),
        backlog=backlog,
        ssl_keyfile=tls.keyfile,
        ssl_certfile=tls.certfile,
        ssl_ca_certs=tls.ca_certs,
        ssl_cert_reqs=tls.cert_reqs,
    )


def allow_open_files(num_connections: int) -> None:
    """Raises this process's limit of open files towards what its connections need, within the allowed
    maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
