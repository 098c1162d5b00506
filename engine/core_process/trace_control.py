"""Starts and stops the scheduler's trace, at startup and on request while the engine runs.

Never blocks on the disk: files are opened and completed on separate threads.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from engine.config.engine_config import TraceConfig
from engine.core_process.core_part import CorePart
from engine.errors import ConfigError
from engine.records.reported_stats import SchedulerStats, TraceState
from tracing.events import TraceHeader
from tracing.parts import split_part
from tracing.tracer import Tracer
from tracing.writer import TraceWriter

logger = logging.getLogger(__name__)

MAX_NAME_CHARS = 100
MAX_RESUMED = 1000
"""Largest number of files of a trace that is switched off and on again."""

HEADER_TIMEOUT_S = 2.0
"""How long a start waits for its trace's header to be in the file."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.jsonl(\.zst)?")


class TraceControl(CorePart):
    """Controls the trace of one engine; thread-safe."""

    def __init__(
        self,
        config: TraceConfig,
        tracer: Tracer,
        lock: AbstractContextManager[object],
        begin: Callable[[bool], TraceHeader],
    ) -> None:
        """``lock`` is the engine's, under which steps are planned. ``begin`` makes the header of a trace that
        starts now; its argument says whether the engine is starting. ConfigError if the trace that starts
        with the engine cannot be written."""
        self._config = config
        self._tracer = tracer
        self._lock = lock
        self._begin = begin
        self._writer: TraceWriter | None = None
        """Writer of the current trace, or of the last one."""
        self._is_on = self._is_opening = False
        self._path: Path | None = None
        self._from_start = False
        self._failure: str | None = None
        self._num_dropped_before = self._num_dropped_reported = 0
        """Events dropped in earlier traces; events dropped in all traces, as last reported."""
        _make_folder(config)
        if config.trace_path is not None:
            self._path, self._writer = _open_at_start(config, Path(config.trace_path))

    def start(self) -> None:
        """Start the trace that was configured to start with the engine, if any.

        Its header is in the file afterwards, unless the disk hangs: whatever awaits the server may read it.
        """
        if self._writer is not None:
            self._from_start = True
            self._take(self._writer)
            self._writer.flush(HEADER_TIMEOUT_S)

    def switch(self, enabled: bool, name: str | None = None) -> TraceState | str:
        """Start a trace, in a file of this name, or stop it; returns an error message if that is refused.

        Does not wait for the disk: the state is ``opening`` or ``closing`` until the file is ready.
        """
        with self._lock:
            if not enabled:
                self._switch_off()
            elif (fault := self._fault_of(name)) is not None:
                return fault
            elif not self._is_on and not self._is_opening:
                self._is_opening = True
                self._failure = None
                threading.Thread(target=self._open, args=(name,), name="trace-open", daemon=True).start()
            return self.state()

    def state(self) -> TraceState:
        with self._lock:
            writer = self._writer
            return TraceState(
                state=self._phase(),
                name=None if self._path is None else self._path.name,
                part=1 if writer is None else writer.part,
                from_start=self._from_start,
                written=0 if writer is None else writer.written,
                dropped=0 if writer is None else writer.dropped,
                error=self._failure or (str(writer.error) if writer is not None and writer.error else None),
            )

    def utilities(self) -> dict[str, Callable[..., Any]]:
        return {"trace_state": self.state, "switch_trace": self.switch}

    def fill_stats(self, stats: SchedulerStats) -> None:
        if self._writer is not None:
            num_dropped = self._num_dropped_before + self._writer.dropped
            stats.trace_dropped = num_dropped - self._num_dropped_reported
            self._num_dropped_reported = num_dropped

    def persist(self, now: float) -> None:
        """Complete the trace; waits for it, unless the disk hangs."""
        if self._writer is not None:
            self._tracer.remove(self._writer)
            self._writer.close()

    def _switch_off(self) -> None:
        if self._is_on and self._writer is not None:
            self._tracer.remove(self._writer)
            self._is_on = False
            self._writer.finish()
            logger.info("Tracing stopped: %s", self._path)

    @property
    def _is_closing(self) -> bool:
        return self._writer is not None and not self._is_on and not self._writer.finished

    def _phase(self) -> Literal["off", "opening", "on", "closing"]:
        if self._is_opening:
            return "opening"
        if self._is_on:
            return "on"
        return "closing" if self._is_closing else "off"

    def _fault_of(self, name: str | None) -> str | None:
        """Why no trace can start or continue in a file of this name; None if it can."""
        if self._is_on or self._is_opening:
            if name is None or (self._path is not None and name == self._path.name):
                return None
            active = "another file" if self._is_opening or self._path is None else self._path.name
            return f"A trace to {active} is already active: stop it first."
        if self._is_closing:
            return "The last trace is still being written: retry when its state is off."
        if self._config.trace_dir is not None:
            return None if name is None else _fault_of_name(name)
        if self._config.trace_path is None:
            return "Tracing is not enabled: start the server with --trace-dir FOLDER or --trace PATH."
        if name is not None:
            return "name needs a server started with --trace-dir FOLDER."
        return None

    # ---- a trace that starts while the engine runs ----

    def _open(self, name: str | None) -> None:
        """Body of the thread that opens a file; a failure is recorded in the state."""
        try:
            path, writer = self._open_new(name)
        except OSError as error:
            with self._lock:
                self._is_opening = False
                self._failure = f"the file cannot be written: {error.strerror or error}"
            return
        with self._lock:
            if self._writer is not None:
                self._num_dropped_before += self._writer.dropped
            self._path = path
            self._writer = writer
            self._is_opening = False
            self._from_start = False
            self._take(writer)

    def _open_new(self, name: str | None) -> tuple[Path, TraceWriter]:
        return _open_first_free(self._config, self._new_paths(name))

    def _new_paths(self, name: str | None) -> Iterator[Path]:
        if self._config.trace_dir is not None:
            when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            yield Path(self._config.trace_dir) / (name or f"trace-{when}.jsonl.zst")
            return
        assert self._config.trace_path is not None
        yield from _numbered(Path(self._config.trace_path))

    def _take(self, writer: TraceWriter) -> None:
        writer.emit(self._begin(self._from_start))
        self._tracer.add(writer)
        self._is_on = True
        logger.info("Tracing to %s", self._path)


def _fault_of_name(name: str) -> str | None:
    if len(name) <= MAX_NAME_CHARS and _NAME.fullmatch(name) and split_part(Path(name))[1] == 1:
        return None
    return (
        f"name must be of at most {MAX_NAME_CHARS} letters, digits, dots, dashes and underscores, and end in "
        ".jsonl or .jsonl.zst."
    )


def _make_folder(config: TraceConfig) -> None:
    if config.trace_dir is None:
        return
    try:
        Path(config.trace_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"trace_dir: cannot create {config.trace_dir!r}: {error.strerror}.") from error


def _open_at_start(config: TraceConfig, path: Path) -> tuple[Path, TraceWriter]:
    """Open the trace's first file. An existing trace, perhaps of a run that crashed, keeps its name, and this
    one takes the next."""
    try:
        taken, writer = _open_first_free(config, itertools.chain([path], _numbered(path)))
    except OSError as error:
        raise ConfigError(f"trace_path: cannot write {str(path)!r}: {error.strerror}.") from error
    if taken != path:
        logger.warning("Trace file %s exists and is kept: writing to %s.", path, taken)
    return taken, writer


def _numbered(path: Path) -> Iterator[Path]:
    """``trace-2.jsonl``, and so on."""
    stem, dot, ending = path.name.partition(".jsonl")
    return (path.with_name(f"{stem}-{number}{dot}{ending}") for number in range(2, MAX_RESUMED))


def _open_first_free(config: TraceConfig, paths: Iterable[Path]) -> tuple[Path, TraceWriter]:
    """Open a writer at the first name that is free: an existing file is never replaced."""
    taken = FileExistsError(17, "File exists")
    for path in paths:
        try:
            writer = TraceWriter.open(
                path, max_bytes=config.trace_max_bytes, max_files=config.trace_max_files, replace=False
            )
        except FileExistsError as error:
            taken = error
        else:
            return path, writer
    raise taken
