"""Supervises several API server processes for one engine core, and restarts one that ends.

They inherit one listening socket. This process owns the core, and serves no requests itself.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from engine.api.config import ServerConfig
from engine.api.processes.api_server import FAILED, READY, APIServerStart, CoreJoined
from engine.api.processes.http_server import DEATH_LINGER_S, FORCED_END_S
from engine.api.processes.server_group import ServerGroup
from engine.api.processes.shared_load import SharedLoad
from engine.api.processes.startup_messages import (
    report_api_server_ended,
    say_core_died,
    say_giving_up,
    say_ready,
)
from engine.config.kv_transfer import HANDOVER_S
from engine.core_group.group_cores import GroupCores
from engine.core_group.group_supervisor import (
    CoreChange,
    CoreDied,
    CoreGivenUp,
    GroupSupervisor,
    Handles,
    with_handle,
)
from engine.core_group.load_board import LoadBoard
from engine.core_process.core_start import CoreSpec
from engine.core_process.launcher import start_error
from engine.errors import EngineDeadError, EngineError
from engine.metrics.shared_page import shared_metrics_environment
from engine.process.private_folder import make_private_folder, remove_private_folder
from engine.process.restart_limit import RESTART_WINDOW_S, RestartLimit
from engine.process.spawn import spawn_command
from engine.records.messages import EngineStartFailed

STOP_MARGIN_S = 3.0
"""Seconds beyond the allowed time after which a stopping API server process is killed."""


@dataclass(frozen=True, slots=True)
class _Ready:
    process: _APIServerProcess


@dataclass(frozen=True, slots=True)
class _Ended:
    process: _APIServerProcess


class _AskedToStop:
    pass


class _AskedToReload:
    pass


_Event = _Ready | _Ended | CoreChange | _AskedToStop | _AskedToReload


class APIServers:
    """One run of a server with several API server processes. Events are handled one at a time, on
    the main thread."""

    def __init__(self, config: ServerConfig, spec: CoreSpec, sock: socket.socket) -> None:
        self._config = config
        self._spec = spec
        self._sock = sock
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._running: list[_APIServerProcess] = []
        self._restarts = RestartLimit()

    def run(self) -> int:
        """Serves until stopped; the exit code is 1 if it stopped without a request to stop. Raises start-up
        errors."""
        previous = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            folder = make_private_folder("continuum-")
            try:
                return self._run(Path(folder))
            finally:
                remove_private_folder(folder)
        finally:
            for number, handler in previous:
                signal.signal(number, handler)

    def _run(self, folder: Path) -> int:
        everyone = ServerGroup(count=self._config.api_server_count, folder=folder)
        self._board = SharedLoad(everyone)
        self._engine_board = LoadBoard(
            self._spec.config.parallel.data_parallel_size, num_processes=everyone.count, folder=folder
        )
        try:
            # They load their libraries while the core loads the model.
            for index in range(everyone.count):
                self._start(replace(everyone, index=index))
            self._supervisor = GroupSupervisor(GroupCores(self._spec), self._events.put)
            try:
                return self._serve()
            finally:
                self._supervisor.close()
        finally:
            for process in self._running:
                process.kill()

    def _serve(self) -> int:
        for process in self._running:
            self._connect(process)
        self._await_all_ready()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._events.put(_AskedToStop()))
        if self._config.access.api_key_file is not None:
            signal.signal(signal.SIGHUP, lambda *_: self._events.put(_AskedToReload()))
        say_ready(self._config, self._sock, self._supervisor.ready)
        return self._watch()

    def _start(self, siblings: ServerGroup) -> _APIServerProcess:
        process = _APIServerProcess(siblings, self._sock, self._events.put)
        self._running.append(process)
        return process

    def _connect(self, process: _APIServerProcess) -> None:
        process.start_with(self._supervisor, self._config, self._spec, self._sock)

    def _await_all_ready(self) -> None:
        waiting = set(self._running)
        while waiting:
            event = self._events.get()
            if isinstance(event, _Ready):
                waiting.discard(event.process)
            elif isinstance(event, _Ended):
                # Others may already serve, and the next process may not fail for the same reason.
                if event.process.failure is not None:
                    raise event.process.failure
                waiting.discard(event.process)
                self._release(event.process)
                if not self._restarts.count():
                    raise EngineDeadError("API server processes die while starting.")
                waiting.add(self._replace(event.process))
            elif not isinstance(event, CoreChange) or not self._take_change(event):
                raise EngineDeadError("The engine core died while the API servers started.")

    # ---- running ----

    def _watch(self) -> int:
        while True:
            event = self._events.get()
            if isinstance(event, _AskedToStop):
                return self._drain(0)
            if isinstance(event, _AskedToReload):
                for process in self._running:
                    process.ask_to_reload()
            if isinstance(event, CoreChange) and not self._take_change(event):
                return self._end_without_core()
            if isinstance(event, _Ended):
                self._release(event.process)
                if not self._restarts.count():
                    say_giving_up(self._restarts.num_ended, RESTART_WINDOW_S)
                    return self._drain(1)
                self._replace(event.process)

    def _take_change(self, change: CoreChange) -> bool:
        """Handles that a core has died or has returned; False if there is none left."""
        if isinstance(change, CoreGivenUp):
            for process in self._running:
                process.tell(change)
            return self._supervisor.given_up(change.index)
        if isinstance(change, CoreDied):
            if not self._supervisor.died(change.index):
                return False
            for process in self._running:
                process.tell(change)
            return True
        self._supervisor.came_back(change)
        for process in self._running:
            handle = change.supervisor.add_client()
            process.core_handles = with_handle(process.core_handles, change.index, handle)
            process.tell(CoreJoined(change.index, handle))
        return True

    def _replace(self, ended: _APIServerProcess) -> _APIServerProcess:
        report_api_server_ended(ended.pid, ended.exit_code)
        process = self._start(ended.siblings)
        self._connect(process)
        return process

    def _release(self, process: _APIServerProcess) -> None:
        """Releases the resources of the process."""
        self._running.remove(process)
        process.kill()  # it has ended; its pipe has not
        self._board.clear(process.siblings.index)
        self._engine_board.clear_process(process.siblings.index)
        if process.core_handles:
            self._supervisor.remove_client(process.core_handles)

    # ---- the end ----

    def _drain(self, exit_code: int) -> int:
        """Accepts no more connections; each process drains its requests as if it were alone."""
        self._sock.close()
        if self._running:
            self._running[0].siblings.say_all_end()
        for process in self._running:
            process.ask_to_stop()
        timeout_s = HANDOVER_S + self._config.shutdown_grace_s + FORCED_END_S + STOP_MARGIN_S
        return self._await_ends(timeout_s, exit_code)

    def _end_without_core(self) -> int:
        """Ends the server after the death of the core: the processes report it to their clients and stop by
        themselves."""
        say_core_died()
        self._sock.close()
        for process in self._running:
            process.tell_the_core_is_gone()
        return self._await_ends(DEATH_LINGER_S + FORCED_END_S + STOP_MARGIN_S, 1)

    def _await_ends(self, timeout_s: float, exit_code: int) -> int:
        deadline = time.monotonic() + timeout_s
        while self._running:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return exit_code  # the remaining ones are killed
            if isinstance(event, _Ended):
                self._release(event.process)
            elif isinstance(event, CoreChange):
                if not self._take_change(event):
                    return self._end_without_core()
            elif isinstance(event, _AskedToStop):
                for process in self._running:
                    process.ask_to_stop()
        return exit_code


class _APIServerProcess:
    """An API server process, as its parent sees it."""

    def __init__(
        self, siblings: ServerGroup, sock: socket.socket, on_event: Callable[[_Event], None]
    ) -> None:
        assert siblings.folder is not None
        self.siblings = siblings
        self.core_handles: Handles = ()
        self.failure: EngineError | None = None
        """The reason why it could not start, if it has reported one."""
        self._report, self._report_fileno = os.pipe()
        self._news_fileno, news = os.pipe()
        self._news = os.fdopen(news, "wb")
        self._process = subprocess.Popen(
            spawn_command("engine.api.processes.api_server"),
            stdin=subprocess.PIPE,
            pass_fds=(sock.fileno(), self._report_fileno, self._news_fileno),
            env=os.environ | shared_metrics_environment(siblings.folder),
        )
        os.close(self._report_fileno)
        os.close(self._news_fileno)
        self.pid = self._process.pid
        self._send(sys.path)
        threading.Thread(target=self._watch, args=(on_event,), name="api-server-watch", daemon=True).start()

    @property
    def exit_code(self) -> int:
        """The exit code once it has ended; negative for a signal."""
        return self._process.wait()

    def start_with(
        self, cores: GroupSupervisor, config: ServerConfig, spec: CoreSpec, sock: socket.socket
    ) -> None:
        """Starts serving, since the cores are ready."""
        self.core_handles = cores.add_client()
        self._send(
            APIServerStart(
                server=config,
                engine=spec.config,
                handles=self.core_handles,
                ready=cores.ready,
                router_factory=spec.router_factory,
                siblings=self.siblings,
                socket_fileno=sock.fileno(),
                report_fileno=self._report_fileno,
                news_fileno=self._news_fileno,
                log_level=logging.getLogger().getEffectiveLevel(),
            )
        )

    def tell(self, change: CoreDied | CoreJoined | CoreGivenUp) -> None:
        """Reports a core's change of state to the process, if it has joined any core yet and is not
        ending."""
        if not self.core_handles or self._news.closed:
            return
        with suppress(BrokenPipeError):
            self._news.write(pickle.dumps(change))
            self._news.flush()

    def ask_to_reload(self) -> None:
        """Let it read the key file again."""
        self._process.send_signal(signal.SIGHUP)

    def ask_to_stop(self) -> None:
        self._process.terminate()

    def tell_the_core_is_gone(self) -> None:
        self._close_pipe()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._close_pipe()

    def _send(self, message: object) -> None:
        """Sends a message; if the process has died already, its end is handled elsewhere."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(pickle.dumps(message))
            self._process.stdin.flush()

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(BrokenPipeError):
            self._news.close()

    def _watch(self, on_event: Callable[[_Event], None]) -> None:
        with os.fdopen(self._report, "rb") as report:
            word = report.read(1)
            if word == READY:
                on_event(_Ready(self))
                word = report.read(1)
            if word == FAILED:
                self.failure = start_error(msgspec.msgpack.decode(report.read(), type=EngineStartFailed))
        self._process.wait()
        on_event(_Ended(self))
