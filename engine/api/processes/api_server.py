"""One of several API server processes: HTTP, tokenizer and detokenizer for a shared core.

``engine.api.processes.api_servers`` starts it. It stops when its standard input is closed: its parent or the
core has ended.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.api.config import ServerConfig
from engine.api.processes.http_server import HttpServer
from engine.api.processes.import_guard import load_tokenizers
from engine.api.processes.joined_cores import JoinedCores
from engine.api.processes.listener import inherited_socket
from engine.api.processes.server_group import ServerGroup
from engine.config.engine_config import EngineConfig
from engine.core_group.group_supervisor import CoreGivenUp, Handles
from engine.core_process.launcher import ClientHandle
from engine.errors import EngineDeadError, EngineError
from engine.frontend.async_llm import AsyncLLM
from engine.metrics.shared_page import METRICS_FOLDER
from engine.process.private_folder import remove_if_left
from engine.process.process_log import begin_log
from engine.records.messages import EngineReady, EngineStartFailed
from engine.routing import RouterFactory

logger = logging.getLogger(__name__)

PARENT_GOES_WITHIN_S = 2.0

READY = b"R"
FAILED = b"F"
"""First byte of the report to the parent; FAILED is followed by an EngineStartFailed."""


@dataclass(frozen=True, slots=True)
class APIServerStart:
    """The data that an API server process gets once the cores are ready."""

    server: ServerConfig
    engine: EngineConfig
    handles: Handles
    ready: EngineReady
    """The capabilities of each core, whether or not it is up."""
    router_factory: RouterFactory
    siblings: ServerGroup
    socket_fileno: int
    report_fileno: int
    news_fileno: int
    log_level: int


@dataclass(frozen=True, slots=True)
class CoreJoined:
    """A new core is ready and replaces one that died."""

    index: int
    handle: ClientHandle


def main() -> None:
    """Entry point of the process; its exit code is 1 if the core died, or it could not start."""
    parent = os.getppid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there are keys to read again
    load_tokenizers()
    try:
        start: APIServerStart = pickle.load(sys.stdin.buffer)
    except EOFError:  # the core could not start, or the parent has ended
        _clear_away(parent, Path(os.environ[METRICS_FOLDER]).parent)
        return
    begin_log(start.log_level, f"API server {os.getpid()}")
    cores = JoinedCores(start.handles, start.ready)
    threading.Thread(target=_await_end, args=(cores,), name="parent-watch", daemon=True).start()
    threading.Thread(
        target=_read_news, args=(cores, start.news_fileno), name="core-news", daemon=True
    ).start()
    exit_code = _serve(start, cores)
    if start.siblings.folder is not None:
        _clear_away(parent, start.siblings.folder)
    sys.exit(exit_code)


def _clear_away(parent: int, folder: Path) -> None:
    """Removes the folder of all API server processes if their parent has died and cannot remove it."""
    deadline = time.monotonic() + PARENT_GOES_WITHIN_S
    while not remove_if_left(folder) and os.getppid() != parent and time.monotonic() < deadline:
        time.sleep(0.02)


def _await_end(cores: JoinedCores) -> None:
    """Waits for the end of the pipe: all cores have died, or the parent has, which ends the cores too."""
    while os.read(0, 1):
        pass
    cores.all_died()


def _read_news(cores: JoinedCores, news_fileno: int) -> None:
    """Reads the parent's messages about single cores."""
    with suppress(EOFError), os.fdopen(news_fileno, "rb") as news:
        while True:
            change = pickle.load(news)
            if isinstance(change, CoreJoined):
                cores.joined(change.index, change.handle)
            elif isinstance(change, CoreGivenUp):
                cores.given_up(change.index)
            else:
                cores.died(change.index)


def _serve(start: APIServerStart, cores: JoinedCores) -> int:
    with os.fdopen(start.report_fileno, "wb", buffering=0) as report:
        try:
            return _run(start, cores, lambda: report.write(READY))
        except EngineError as error:
            failure = EngineStartFailed(type(error).__name__, str(error))
        except Exception as error:
            logger.exception("An API server process failed.")
            failure = EngineStartFailed(
                EngineDeadError.__name__, f"An API server process failed: {error!r}; see its log."
            )
        with suppress(BrokenPipeError):  # the parent has died, and the core with it
            report.write(FAILED + msgspec.msgpack.encode(failure))
        return 1


def _run(start: APIServerStart, cores: JoinedCores, on_ready: Callable[[], object]) -> int:
    client = cores.client(start.router_factory, start.siblings)
    engine = AsyncLLM(start.engine, client, log_stats=start.engine.log_stats)
    try:
        sock = inherited_socket(start.server, start.socket_fileno)
        server = HttpServer(start.server, engine, sock, start.siblings, on_ready=on_ready)
        return server.run()
    finally:
        engine.shutdown()
