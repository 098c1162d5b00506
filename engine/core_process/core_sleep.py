"""Sleep, wake-up and new weights of an engine core."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from engine.clock import Clock
from engine.core.scheduler import Scheduler
from engine.core.scheduler_report import PauseState
from engine.core.traced_scheduler import TracedScheduler
from engine.errors import RequestError
from engine.executor import Executor

LEVELS = (1, 2)
SLOW_UTILITIES = frozenset(("sleep", "wake_up", "update_weights"))
"""Calls that may take as long as loading a model."""


class CoreSleep:
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
        self._pause_before: PauseState | None = None
        """What an operator had paused before the engine was asked to rest; None: it was not."""
        self._changing = threading.Lock()
        """Held while the engine changes: a call may take as long as loading a model."""

    def by_name(self) -> dict[str, Callable[..., Any]]:
        """The utilities by the names under which another process calls them."""
        utilities = (self.sleep, self.wake_up, self.sleep_level, self.update_weights, self.stop_resting)
        return {utility.__name__: utility for utility in utilities}

    def sleep(self, level: int) -> bool:
        """Go to sleep; False while requests run: then nothing new is admitted, and it is asked again. Cached
        prefixes are evicted and pins end, on all tiers."""
        if level not in LEVELS:
            raise RequestError(f"level must be 1 or 2, got {level}.", "level")
        with self._changing:
            if self._level >= level:
                return True
            self._executor.call_worker("check_alone")  # before it costs anybody anything
            if not self._rests():
                return False
            try:
                self._executor.call_worker("sleep", level)
            except BaseException:
                self._go_on()
                raise
            self._level = level
            return True

    def wake_up(self) -> None:
        """Load the weights if they were dropped, and go on with what waits."""
        with self._changing:
            if self._level:
                self._executor.call_worker("wake_up")
            self._level = 0
            self._go_on()

    def sleep_level(self) -> int:
        """0: it is awake."""
        return self._level

    def update_weights(self, folder: str) -> bool:
        """Serve the weights of another folder; False while requests run, as in ``sleep``."""
        with self._changing:
            if self._level:
                raise RequestError("The engine sleeps: wake it up first.", "path")
            self._executor.call_worker("check_weights", folder)  # before it costs anybody anything
            if not self._rests():
                return False
            try:
                self._executor.call_worker("update_weights", folder)
            finally:
                self._go_on()
            return True

    def stop_resting(self) -> None:
        """Go on: whoever had asked the engine to rest waits no more."""
        with self._changing:
            if not self._level:
                self._go_on()

    def _rests(self) -> bool:
        """Admit nothing more, and evict what is cached; False while requests or steps still hold blocks."""
        with self._lock:
            scheduler, now = self._scheduler(), self._clock.now()
            if self._pause_before is None:
                self._pause_before = scheduler.pause_state
            if self._pause_before is PauseState.PAUSED_ALL and scheduler.running:
                self._pause_before = None
                raise RequestError("Running requests are paused, and would never end: resume first.", "mode")
            scheduler.set_pause_state(PauseState.PAUSED_NEW, now)
            is_done = not scheduler.steps.num_under_way and scheduler.reset_prefix_cache(now)
            if is_done:
                scheduler.reset_encoder_cache(now)
            return is_done

    def _go_on(self) -> None:
        """As it was before, paused or not."""
        with self._lock:
            if self._pause_before is not None:
                self._scheduler().set_pause_state(self._pause_before, self._clock.now())
            self._pause_before = None
