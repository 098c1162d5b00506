"""Runs a server: one process, or several API server processes for one core."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from engine.api.config import ServerConfig
from engine.api.processes.import_guard import load_tokenizers
from engine.api.processes.listener import bound_socket
from engine.api.processes.server_group import ALONE
from engine.api.processes.startup_messages import say_core_died, say_ready
from engine.core_process.core_start import CoreSpec
from engine.core_process.launcher import CoreProcess
from engine.process.process_log import plain_log

if TYPE_CHECKING:
    from engine.frontend.async_llm import AsyncLLM


def serve(config: ServerConfig, spec: CoreSpec) -> int:
    """Serves until stopped; the exit code is 1 if the engine core died. Raises start-up errors."""
    plain_log()
    with bound_socket(config) as sock:
        if config.api_server_count > 1:
            from engine.api.processes.api_servers import APIServers

            return APIServers(config, spec, sock).run()
        return _serve_alone(config, spec, sock)


def _serve_alone(config: ServerConfig, spec: CoreSpec, sock: socket.socket) -> int:
    """Runs the API server and the supervisor of the core in one process."""
    if spec.config.parallel.data_parallel_size > 1:
        return _serve_group(config, spec, sock)
    core = CoreProcess(spec)
    core.launch()

    # These take seconds, during which the core continues.
    import engine.api.processes.http_server  # noqa: F401
    from engine.core_process.core_client import AsyncMPClient
    from engine.frontend.async_llm import AsyncLLM

    load_tokenizers()
    client = AsyncMPClient(core)
    return _run(config, sock, AsyncLLM(spec.config, client, log_stats=spec.config.log_stats))


def _serve_group(config: ServerConfig, spec: CoreSpec, sock: socket.socket) -> int:
    """Runs the API server and the supervisor of several cores in one process."""
    from engine.core_group.group_cores import GroupCores
    from engine.core_group.own_group import OwnCoreGroup
    from engine.frontend.async_llm import AsyncLLM

    group = OwnCoreGroup(GroupCores(spec), spec.router_factory)
    load_tokenizers()
    return _run(config, sock, AsyncLLM(spec.config, group, log_stats=spec.config.log_stats))


def _run(config: ServerConfig, sock: socket.socket, engine: AsyncLLM) -> int:
    from engine.api.processes.http_server import HttpServer

    try:
        server = HttpServer(
            config,
            engine,
            sock,
            ALONE,
            on_ready=lambda: say_ready(config, sock, engine.ready),
            on_death=say_core_died,
        )
        return server.run()
    finally:
        engine.shutdown()
