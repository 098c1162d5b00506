"""HTTP in one process: from ready to stopped, with the signals and the death of the core in between.

Everything about requests is the application's.
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
from engine.api.processes.listener import cannot_listen
from engine.api.processes.siblings import Siblings
from engine.api.served_model import ServedModel
from engine.async_llm import AsyncLLM
from engine.garbage import settle

DEATH_LINGER_S = 2.0
"""How long the server answers 503 after the core died, so that streams end and probes see it."""
FORCED_END_S = 2.0
"""After the grace period, how long the errors may take to reach the clients."""
ACCEPTED_S = 0.2
"""How long a connection that was just taken may need until its request is there."""
BACKLOG = 2048
"""Connections that may wait until a process takes them."""


class _Uvicorn(uvicorn.Server):
    """uvicorn with our signals in place of its own, which would kill the process after a clean stop."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, if it is there: it sends an answer in one piece, and does each turn in less time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class HttpServer:
    """One run of a front end, from ready to stopped."""

    def __init__(
        self,
        config: ServerConfig,
        engine: AsyncLLM,
        sock: socket.socket,
        siblings: Siblings,
        *,
        on_ready: Callable[[], object],
        on_death: Callable[[], object] = lambda: None,
    ) -> None:
        """``on_ready``: connections are taken. ``on_death``: the core has died."""
        self._config = config
        self._engine = engine
        self._sock = sock
        self._siblings = siblings
        self._on_ready = on_ready
        self._on_death = on_death
        # Ctrl-C of a terminal reaches all: among siblings their parent decides what it means.
        self._stop_signals = (signal.SIGINT, signal.SIGTERM) if siblings.count == 1 else (signal.SIGTERM,)
        self._model = ServedModel(engine, config, siblings)
        self._stop = asyncio.Event()
        self._http = _Uvicorn(
            http_config(
                create_app(self._model),
                config,
                shutdown_timeout_s=config.shutdown_grace_s + FORCED_END_S,
                backlog=BACKLOG if siblings.count == 1 else 1,
            ),
            self._listening,
        )

    def run(self) -> int:
        """Serve until told to stop; the exit code is 1 if the core died."""
        with asyncio.Runner(loop_factory=event_loop) as runner:
            return runner.run(self._run())

    async def _run(self) -> int:
        allow_open_files(self._config.limits.max_connections)
        settle()
        loop = asyncio.get_running_loop()
        for number in self._stop_signals:
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._http.serve([self._sock]))
        stop = asyncio.create_task(self._stop.wait())
        dead = asyncio.create_task(self._engine.dead.wait())
        listening = asyncio.create_task(self._model.pulse.listen())
        await asyncio.wait({serving, stop, dead}, return_when=asyncio.FIRST_COMPLETED)
        if dead.done():
            self._on_death()
            await asyncio.wait({serving, stop}, timeout=DEATH_LINGER_S, return_when=asyncio.FIRST_COMPLETED)
            self._http.force_exit = True  # nothing is left to wait for
        await self._end(serving)
        for task in (stop, dead, listening):
            task.cancel()
        return 1 if self._engine.errored else 0

    def _listening(self) -> None:
        # asyncio takes as many connections at a time as it lets wait. With siblings that is one, so that a
        # process which is free comes before one which is busy taking; more may wait all the same.
        self._sock.listen(BACKLOG)
        self._on_ready()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._http.force_exit = True  # asked twice: do not wait for anybody
        self._stop.set()

    async def _leave_to_others(self) -> None:
        """Take no more connections: the siblings do. Those just taken still get their answer."""
        for server in self._http.servers:
            server.close()
        for connection in list(self._http.server_state.connections):
            if getattr(connection, "cycle", None) is not None:
                connection.shutdown()  # at once, or after the answer that is under way
        await asyncio.sleep(ACCEPTED_S)

    async def _end(self, serving: asyncio.Task[None]) -> None:
        """Answer 503 to all that is new, let running requests go on for the grace period, then end them."""
        if self._siblings.others_go_on:
            await self._leave_to_others()
        drained = asyncio.create_task(self._model.admission.drain())
        await asyncio.wait(
            {serving, drained}, timeout=self._config.shutdown_grace_s, return_when=asyncio.FIRST_COMPLETED
        )
        drained.cancel()
        self._http.should_exit = True
        await self._model.end_all()
        try:
            await serving
        except OSError as error:  # another server began to listen while our model was loading
            raise cannot_listen(self._config, error) from error
