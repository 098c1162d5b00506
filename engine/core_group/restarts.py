"""Restarts cores of a group after their death, and starts later ones, each on a separate thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from engine.core_group.group_cores import GroupCores, StartableCore
from engine.errors import EngineError
from engine.process.process_log import start_log
from engine.process.restart_limit import MAX_RESTARTS, RESTART_WINDOW_S, RestartLimit

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
"""Delay between two attempts; doubled each time."""


class CoreHandle(Protocol):
    """Holds a core that was started."""

    @property
    def pid(self) -> int: ...

    def ask_to_end(self) -> None: ...

    def close(self) -> None: ...


Handle = TypeVar("Handle", bound=CoreHandle)


class CoreRestarts(Generic[Handle]):
    """Owned by the process that owns the cores. Thread-safe."""

    def __init__(
        self,
        cores: GroupCores,
        start: Callable[[int, StartableCore], Handle],
        on_back: Callable[[int, Handle], None],
        on_given_up: Callable[[int], None],
    ) -> None:
        """``start`` waits until the core is ready, and returns its handle. All three are called on the
        restart's thread."""
        self._cores = cores
        self._start = start
        self._on_back = on_back
        self._on_given_up = on_given_up
        self._limits = [RestartLimit() for _ in range(cores.count)]
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._starting: dict[int, StartableCore] = {}
        self._is_hopeless = False
        self._ending: set[int] = set()
        """Cores that are about to end because another one, with which they share experts, has died."""

    def begin(self, index: int) -> None:
        """Start a core that the group did not wait for."""
        self._on_thread(index, None, will=True)

    def restart(self, index: int, old: CoreHandle, others: Mapping[int, CoreHandle]) -> bool:
        """Close the handle of a core that died and start another; False if it has died too often. If cores
        share experts, end the others that are up, too."""
        if self._cores.share_experts:
            self._end_others(index, others)
        will = self._may_start(index) and not self._closing.is_set()
        self._on_thread(index, old, will=will)
        return will

    def _on_thread(self, index: int, old: CoreHandle | None, *, will: bool) -> None:
        name = f"core-restart-{index}"
        threading.Thread(target=self._run, args=(index, old, will), name=name, daemon=True).start()

    def _end_others(self, index: int, others: Mapping[int, CoreHandle]) -> None:
        if index in self._ending:
            self._ending.discard(index)
            return
        self._ending.update(others)
        with self._lock:
            self._cores.meet_anew()
            self._end_starting()
        for core in others.values():
            core.ask_to_end()

    def _may_start(self, index: int) -> bool:
        """Count one more end of a core; returns whether to start it again. Where cores share experts, one
        that is not started keeps the others from starting."""
        with self._lock:
            if not self._limits[index].count() and self._cores.share_experts:
                self._is_hopeless = True
                self._end_starting()
            return self._limits[index].allows_more and not self._is_hopeless

    def _end_starting(self) -> None:
        for core in self._starting.values():
            core.ask_to_end()

    def close(self) -> None:
        """Stop what is being started, and start nothing more."""
        self._closing.set()
        with self._lock:
            starting = list(self._starting.values())
        for core in starting:
            core.stop()

    def _run(self, index: int, old: CoreHandle | None, will: bool) -> None:
        if old is not None:
            old.close()
        delay_s = FIRST_DELAY_S
        while will and not self._closing.is_set():
            try:
                handle = self._started(index)
            except EngineError as error:
                if self._closing.is_set():
                    return
                logger.error("Engine core %d could not be started: %s", index, error)
                will = self._may_start(index)
                self._closing.wait(delay_s)
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)
            else:
                start_log.info("Engine core %d is ready again, as process %d.", index, handle.pid)
                self._on_back(index, handle)
                return
        if not self._closing.is_set():
            self._on_given_up(index)

    def _started(self, index: int) -> Handle:
        with self._lock:
            core = self._cores.make(index)
            core.launch()
            self._starting[index] = core
        try:
            if self._closing.is_set():
                core.stop()
            return self._start(index, core)
        finally:
            with self._lock:
                del self._starting[index]


def report_core_died(
    index: int, pid: int, exit_code: int | None, *, comes_back: bool, share_experts: bool
) -> None:
    """Report a core's death to the user of the server."""
    others = "the others end with it, as they share experts" if share_experts else "the other cores go on"
    what_follows = (
        "it is started again"
        if comes_back
        else f"it is not started again, as it has ended more than {MAX_RESTARTS} times in "
        f"{RESTART_WINDOW_S:.0f} s"
    )
    start_log.warning(
        "Engine core %d (process %d) exited with code %s: its requests end with an error, %s, and %s.",
        index,
        pid,
        exit_code,
        others,
        what_follows,
    )
