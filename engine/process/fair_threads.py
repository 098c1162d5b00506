"""Threads that work for several owners in turns: what one owner asks for does not hold up the others."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

Work = Callable[[], object]


def _always() -> bool:
    return True


class FairThreads:
    """Thread-safe. Threads are started as they are needed, and end with the process."""

    def __init__(self, num_threads: int, name: str, *, most_per_owner: int | None = None) -> None:
        """``most_per_owner``: threads that one owner may have at a time; None: all of them."""
        self._num_threads = num_threads
        self._most_per_owner = most_per_owner or num_threads
        self._name = name
        self._waiting: OrderedDict[str, deque[tuple[Work, Callable[[], bool]]]] = OrderedDict()
        """Work by owner; whose turn is next comes first."""
        self._running: dict[str, int] = {}
        self._num_started = self._num_idle = 0
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, owner: str, work: Work, is_wanted: Callable[[], bool] = _always) -> None:
        """Run this on a thread in the owner's turn, unless nobody wants it any more by then."""
        with self._changed:
            if self._closed:
                return
            self._waiting.setdefault(owner, deque()).append((work, is_wanted))
            if not self._num_idle and self._num_started < self._num_threads:
                name = f"{self._name}-{self._num_started}"
                self._num_started += 1
                threading.Thread(target=self._run, name=name, daemon=True).start()
            self._changed.notify()

    def close(self) -> None:
        """Start nothing more. Repeatable."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            owner, work, is_wanted = job
            try:
                if is_wanted():
                    work()
            except Exception:
                logger.exception("Work on %s failed.", self._name)
            finally:
                with self._changed:
                    self._running[owner] -= 1
                    if not self._running[owner]:
                        del self._running[owner]
                    self._changed.notify()

    def _next(self) -> tuple[str, Work, Callable[[], bool]] | None:
        with self._changed:
            while not self._closed:
                for owner, jobs in self._waiting.items():
                    if self._running.get(owner, 0) < self._most_per_owner:
                        work, is_wanted = jobs.popleft()
                        self._waiting.move_to_end(owner)
                        if not jobs:
                            del self._waiting[owner]
                        self._running[owner] = self._running.get(owner, 0) + 1
                        return owner, work, is_wanted
                self._num_idle += 1
                self._changed.wait()
                self._num_idle -= 1
        return None
