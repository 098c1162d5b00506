"""Operators' changes to an engine core: pause, sleep and new weights, and why nothing is admitted.

Each reason is recorded separately, so that none undoes another: a core that is paused, put to sleep, resumed
and woken up runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from engine.clock import Clock
from engine.core.scheduler import Scheduler
from engine.core.scheduler_report import PauseState
from engine.core.traced_scheduler import TracedScheduler
from engine.errors import RequestError
from engine.executor import Executor
from engine.records.door import Door
from engine.records.handed_over import HAND_OVER
from engine.records.operator_record import OperatorRecord

logger = logging.getLogger(__name__)

LEVELS = (1, 2)
SLOW_UTILITIES = frozenset(("sleep", "wake_up", "update_weights", "undo_weights", "take_record", HAND_OVER))
"""Calls that may take as long as loading a model."""


class Reason(StrEnum):
    """Why nothing is admitted."""

    PAUSED = "paused"
    KEPT = "paused with all that runs"
    ASLEEP = "asleep"
    RESTING = "coming to rest"
    NO_WEIGHTS = "without weights: neither the new ones nor those before could be loaded"


class CoreOperations:
    """Thread-safe. A core that sleeps keeps its queue: what waits runs after ``wake_up``."""

    def __init__(
        self,
        scheduler: Callable[[], Scheduler | TracedScheduler],
        executor: Executor,
        clock: Clock,
        lock: threading.Condition,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._lock = lock
        self._level = 0
        self._reasons: set[Reason] = set()
        self._weights: str | None = None
        """The folder of the weights that are served; None: that of the start."""
        self._weights_before: str | None = None
        self._changing = threading.Lock()
        """Held while the engine changes: a call may take as long as loading a model."""
        self.taking = Door.OPEN
        """Which requests are taken."""
        self.on_loaded: Callable[[Path | None], None] = lambda saved: None
        """Called when weights have been loaded, with the folder of their saved KV, if there is one."""
        self.switch_trace: Callable[[bool, str | None], object] = lambda enabled, name: None

    def by_name(self) -> dict[str, Callable[..., Any]]:
        """The utilities by the names under which another process calls them."""
        utilities = (
            *(self.pause, self.resume, self.rest, self.stop_resting, self.check_operation, self.sleep),
            *(self.wake_up, self.sleep_level, self.update_weights, self.undo_weights, self.take_record),
            *(self.why_paused, self.set_door, self.door),
        )
        return {utility.__name__: utility for utility in utilities}

    # ---- which requests are taken ----

    def set_door(self, door: str) -> None:
        """Change which requests are taken: a ``Door``."""
        with self._lock:
            self.taking = Door(door)

    def door(self) -> str:
        return self.taking.value

    # ---- why nothing is admitted ----

    def pause(self, running_too: bool = False) -> None:
        self._set(add=Reason.KEPT if running_too else Reason.PAUSED, drop=(Reason.PAUSED, Reason.KEPT))

    def resume(self) -> None:
        """End the pause. A core that sleeps stays asleep."""
        self._set(drop=(Reason.PAUSED, Reason.KEPT))

    def why_paused(self) -> list[str]:
        """The reasons why nothing is admitted; empty if requests are admitted."""
        with self._lock:
            return sorted(reason.value for reason in self._reasons)

    def _set(self, *, add: Reason | None = None, drop: tuple[Reason, ...] = ()) -> None:
        with self._lock:
            self._reasons -= set(drop)
            if add is not None:
                self._reasons.add(add)
            state = PauseState.PAUSED_NEW if self._reasons else PauseState.UNPAUSED
            if Reason.KEPT in self._reasons:
                state = PauseState.PAUSED_ALL
            if self._scheduler().pause_state is not state:
                self._scheduler().set_pause_state(state, self._clock.now())

    # ---- rest ----

    def rest(self) -> bool:
        """Admit nothing more, and evict what is cached, on all tiers; False while requests or steps still
        hold blocks: then the caller tries again. ``stop_resting`` ends it."""
        with self._changing:
            return self._rests()

    def _rests(self) -> bool:
        with self._lock:
            scheduler = self._scheduler()
            now = self._clock.now()
            if Reason.KEPT in self._reasons and scheduler.running:
                raise RequestError("Running requests are paused, and would never end: resume first.", "mode")
            self._set(add=Reason.RESTING)
            is_done = not scheduler.steps.num_under_way and scheduler.reset_prefix_cache(now)
            if is_done:
                scheduler.reset_encoder_cache(now)
            return is_done

    def stop_resting(self) -> None:
        """Admit requests again: the caller that wanted the engine to rest waits no more."""
        with self._changing:
            self._set(drop=(Reason.RESTING,))

    # ---- sleep and weights ----

    def check_operation(self, method: str, *args: Any) -> None:
        """Refuse an invalid ``sleep`` or ``update_weights`` call before it disturbs any request."""
        if method == "sleep":
            if args[0] not in LEVELS:
                raise RequestError(f"level must be 1 or 2, got {args[0]}.", "level")
            self._executor.call_worker("check_alone")
            return
        if self._level:
            raise RequestError("The engine sleeps: wake it up first.", "path")
        self._executor.call_worker("check_weights", *args)

    def sleep(self, level: int) -> bool:
        """Go to sleep; False unless it rests."""
        self.check_operation("sleep", level)
        with self._changing:
            if self._level >= level:
                return True
            if not self._rests():
                return False
            self._executor.call_worker("sleep", level)
            self._level = level
            self._set(add=Reason.ASLEEP)
            return True

    def wake_up(self) -> None:
        """Load the weights if they were dropped, and continue with waiting requests."""
        with self._changing:
            if self._level:
                self.on_loaded(self._executor.call_worker("wake_up"))
            self._level = 0
            self._set(drop=(Reason.ASLEEP,))

    def sleep_level(self) -> int:
        """How deep the engine sleeps; 0: it is awake."""
        return self._level

    def update_weights(self, folder: str) -> bool:
        """Serve the weights of another folder; False unless it rests."""
        self.check_operation("update_weights", folder)
        with self._changing:
            if not self._rests():
                return False
            self._load(folder)
            self._weights_before = self._weights
            self._weights = folder
            return True

    def undo_weights(self, folder: str) -> None:
        """If this folder is served, serve the weights before it: another core could not load it."""
        with self._changing:
            if self._weights == folder:
                self._load(self._weights_before)
                self._weights = self._weights_before

    def _load(self, folder: str | None) -> None:
        """Load a folder's weights; None: those of the start. The worker restores the previous ones if it
        cannot."""
        try:
            saved = self._executor.call_worker("update_weights", folder)
        except BaseException as error:
            if not self._executor.call_worker("has_weights"):
                logger.exception("Neither the new weights nor those before could be loaded.")
                self._set(add=Reason.NO_WEIGHTS)
            if isinstance(error, RequestError):
                raise
            reason = f"The weights in {folder} cannot be served: {error!r}"
            raise RequestError(reason, "path") from error
        self._set(drop=(Reason.NO_WEIGHTS,))
        self.on_loaded(saved)

    # ---- a core that comes later ----

    def take_record(self, given: Any) -> None:
        """Apply the operators' changes to the other cores, before any request is served."""
        record = msgspec.convert(given, OperatorRecord)
        if record.weights != self._weights and record.weights is not None:
            _at_once(self.update_weights(record.weights))
            self.stop_resting()
        if record.level > self._level:
            _at_once(self.sleep(record.level))
            self.stop_resting()
        elif self._level and not record.level:
            self.wake_up()
        self.set_door(record.door)
        if record.paused is None:
            self.resume()
        else:
            self.pause(record.paused)
        if record.trace is not None:
            self.switch_trace(*record.trace)


def _at_once(is_done: bool) -> None:
    """Raise RequestError unless it is done: a core that serves nothing yet rests already."""
    if not is_done:
        raise RequestError("A core that joins the group must not have requests.", "record")
