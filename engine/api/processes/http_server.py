"""Runs HTTP in one process: start, signals, death of the core, shutdown.

The application handles the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Generator

import uvicorn

from engine.api.app import create_app
from engine.api.config import ServerConfig
from engine.api.http.http_config import allow_open_files, http_config
from engine.api.processes.listener import begin_listening
from engine.api.processes.server_group import ServerGroup
from engine.api.service.server import Server
from engine.config.kv_transfer import HANDOVER_S
from engine.errors import EngineError
from engine.frontend.async_llm import AsyncLLM
from engine.process.trim import finish_startup

DEATH_LINGER_S = 2.0
"""Seconds for which the server still answers 503 after the core died, so that streams end and probes notice
it."""
FORCED_END_S = 2.0
"""Seconds for which errors may take to reach clients after the grace period."""
ACCEPTED_S = 0.2
"""Seconds for which a newly accepted connection may take to send its request."""
BACKLOG = 2048
"""Number of connections that may wait to be accepted."""


class _Uvicorn(uvicorn.Server):
    """uvicorn with other signal handlers: its own would kill the process after a clean stop."""

    def __init__(
        self, config: uvicorn.Config, listen: Callable[[], object], on_ready: Callable[[], object]
    ) -> None:
        super().__init__(config)
        self._listen = listen
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._listen()  # uvloop would keep the error to itself, and close the socket
        await super().startup(sockets)
        # It accepts as many connections at once as its backlog. With several processes that is one, so that
        # an idle process accepts before a busy one; the kernel lets more wait all the same.
        self._listen()
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's event loop, if installed: it sends a response in one write, and has less overhead per turn."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class HttpServer:
    """One run of an API server process."""

    def __init__(
        self,
        config: ServerConfig,
        engine: AsyncLLM,
        sock: socket.socket,
        siblings: ServerGroup,
        *,
        on_ready: Callable[[], object],
        on_death: Callable[[], object] = lambda: None,
    ) -> None:
        """``on_ready``: called when connections are accepted. ``on_death``: called when the core has died."""
        self._config = config
        self._engine = engine
        self._sock = sock
        self._siblings = siblings
        self._on_death = on_death
        # Ctrl-C in a terminal reaches all processes: where there are several, their parent handles it.
        self._stop_signals = (signal.SIGINT, signal.SIGTERM) if siblings.count == 1 else (signal.SIGTERM,)
        self._server = Server(engine, config, siblings)
        self._stop = asyncio.Event()
        self._http = _Uvicorn(
            http_config(
                create_app(self._server),
                config,
                self._server.keys,
                shutdown_timeout_s=config.shutdown_grace_s + FORCED_END_S,
                backlog=BACKLOG if siblings.count == 1 else 1,
            ),
            lambda: begin_listening(config, sock, BACKLOG),
            on_ready,
        )

    def run(self) -> int:
        """Serves until stopped; the exit code is 1 if the core died."""
        with asyncio.Runner(loop_factory=event_loop) as runner:
            try:
                return runner.run(self._run())
            finally:
                self._server.close()

    async def _run(self) -> int:
        allow_open_files(self._config.limits.max_connections)
        finish_startup()
        loop = asyncio.get_running_loop()
        for number in self._stop_signals:
            loop.add_signal_handler(number, self._on_signal)
        if self._server.quotas is not None:
            loop.add_signal_handler(signal.SIGHUP, self._server.quotas.reload)
        serving = asyncio.create_task(self._http.serve([self._sock]))
        stop = asyncio.create_task(self._stop.wait())
        dead = asyncio.create_task(self._engine.dead.wait())
        listening = asyncio.create_task(self._server.heartbeat.run())
        await asyncio.wait({serving, stop, dead}, return_when=asyncio.FIRST_COMPLETED)
        if dead.done():
            self._on_death()
            await asyncio.wait({serving, stop}, timeout=DEATH_LINGER_S, return_when=asyncio.FIRST_COMPLETED)
            self._http.force_exit = True  # there is nothing left to wait for
        await self._end(serving)
        for task in (stop, dead, listening):
            task.cancel()
        return 1 if self._engine.errored else 0

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._http.force_exit = True  # the second signal: stop at once
        self._stop.set()

    async def _leave_to_others(self) -> None:
        """Accepts no more connections, so that other processes get them. Those just accepted are still
        served."""
        for server in self._http.servers:
            server.close()
        for connection in list(self._http.server_state.connections):
            if getattr(connection, "cycle", None) is not None:
                connection.shutdown()  # at once, or after the response in progress
        await asyncio.sleep(ACCEPTED_S)

    async def _hand_over(self) -> None:
        """Saves what paused jobs need elsewhere, as far as time allows: a failure only costs recomputing."""
        if self._siblings.others_go_on or self._engine.errored:
            return
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(HANDOVER_S):
                await self._engine.hand_over(HANDOVER_S)

    async def _end(self, serving: asyncio.Task[None]) -> None:
        """Lets running requests finish within the grace period, then ends them. Meanwhile new requests get
        503, unless there are siblings: these get the new connections, and requests over connections accepted
        here are still served. Other servers find the KV of paused jobs before they get their turns."""
        await self._hand_over()
        if self._siblings.others_go_on and not serving.done():
            await self._leave_to_others()
        else:
            self._server.admission.close()
        ended = asyncio.create_task(self._server.admission.all_ended())
        await asyncio.wait(
            {serving, ended}, timeout=self._config.shutdown_grace_s, return_when=asyncio.FIRST_COMPLETED
        )
        ended.cancel()
        self._http.should_exit = True
        await self._server.end_all()
        await serving
