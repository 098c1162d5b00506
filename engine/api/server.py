"""A server process: its socket, its signals, and the end of it. Everything else is the application's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Generator

import uvicorn

from engine.api.app import create_app
from engine.api.config import ServerConfig
from engine.api.served_model import ServedModel
from engine.async_llm import AsyncLLM
from engine.errors import ConfigError

DEATH_LINGER_S = 2.0
"""How long the server answers 503 after the core died, so that streams end and probes see it."""
FORCED_END_S = 2.0
"""After the grace period, how long the errors may take to reach the clients."""


def serve(config: ServerConfig, make_engine: Callable[[], AsyncLLM]) -> int:
    """Serve until told to stop; the exit code is 1 if the engine core died. Start-up errors are raised."""
    with _bound_socket(config) as sock:
        engine = make_engine()
        try:
            return asyncio.run(_Process(config, engine, sock).run())
        finally:
            engine.shutdown()


def _bound_socket(config: ServerConfig) -> socket.socket:
    """Taken before the model is loaded, which may take minutes, so that a port in use is told at once.
    It does not listen yet: probes are refused until the server can answer."""
    # asyncio sends at once only on sockets that say they are TCP: else a first token waits 40 ms for the
    # acknowledgement of the headers.
    protocol = 0 if config.uds is not None else socket.IPPROTO_TCP
    sock = socket.socket(_family(config), socket.SOCK_STREAM, protocol)
    try:
        if config.uds is not None:
            _remove_stale_socket(config.uds)
            sock.bind(config.uds)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((config.host or "", config.port))
    except OSError as error:
        sock.close()
        raise _cannot_listen(config, error) from error
    return sock


def _family(config: ServerConfig) -> socket.AddressFamily:
    if config.uds is not None:
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in (config.host or "") else socket.AF_INET


def _remove_stale_socket(path: str) -> None:
    """What a killed server left behind; anything but a socket is left alone, and then bind fails."""
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        os.unlink(path)


def _cannot_listen(config: ServerConfig, error: OSError) -> ConfigError:
    where = config.uds or f"{config.host or '0.0.0.0'}:{config.port}"
    return ConfigError(f"Cannot listen on {where}: {error.strerror or error}.")


class _Uvicorn(uvicorn.Server):
    """uvicorn with our signals in place of its own, which would kill the process after a clean stop."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Process:
    """One run of the server, from ready to stopped."""

    def __init__(self, config: ServerConfig, engine: AsyncLLM, sock: socket.socket) -> None:
        self._config = config
        self._engine = engine
        self._sock = sock
        self._model = ServedModel(engine, config)
        self._stop = asyncio.Event()
        self._http = _Uvicorn(
            uvicorn.Config(
                create_app(self._model),
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=config.keep_alive_s,
                timeout_graceful_shutdown=round(config.shutdown_grace_s + FORCED_END_S),
            ),
            self._say_ready,
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._http.serve([self._sock]))
        stop = asyncio.create_task(self._stop.wait())
        dead = asyncio.create_task(self._engine.dead.wait())
        await asyncio.wait({serving, stop, dead}, return_when=asyncio.FIRST_COMPLETED)
        if dead.done():
            print("The engine core process has died; the server stops.", file=sys.stderr, flush=True)
            await asyncio.wait({serving, stop}, timeout=DEATH_LINGER_S, return_when=asyncio.FIRST_COMPLETED)
            self._http.force_exit = True  # nothing is left to wait for
        await self._end(serving)
        for task in (stop, dead):
            task.cancel()
        return 1 if self._engine.errored else 0

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._http.force_exit = True  # asked twice: do not wait for anybody
        self._stop.set()

    async def _end(self, serving: asyncio.Task[None]) -> None:
        """Take no more connections, let running requests go on for the grace period, then end them."""
        self._http.should_exit = True
        await asyncio.wait({serving}, timeout=self._config.shutdown_grace_s)
        await self._model.end_all()
        try:
            await serving
        except OSError as error:  # another server began to listen while our model was loading
            raise _cannot_listen(self._config, error) from error

    def _say_ready(self) -> None:
        if self._config.uds is not None:
            where = f"unix:{self._config.uds}"
        else:
            host = self._config.host or "0.0.0.0"
            port = self._sock.getsockname()[1]
            where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"Serving {self._model.name} at {where}", flush=True)
