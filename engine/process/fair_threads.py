"""Threads that serve several owners in turns, so that one owner's work does not delay the others'."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    owner: str
    work: Callable[[], Any]
    done: Future[Any]

    def run(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self.work())
        except BaseException as error:
            self.done.set_exception(error)


class FairThreads:
    """An executor as in ``concurrent.futures``, but with owners. Thread safe; its threads start when they are
    needed, and end with the process."""

    def __init__(self, num_threads: int, name: str, *, most_per_owner: int | None = None) -> None:
        """``most_per_owner``: maximum number of threads that serve one owner at a time; None: all."""
        self._num_threads = num_threads
        self._most_per_owner = most_per_owner or num_threads
        self._name = name
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        """Waiting jobs by owner, in the order of the owners' turns."""
        self._num_waiting = 0
        self._running: dict[str, int] = {}
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, owner: str, work: Callable[[], T]) -> Future[T]:
        """Runs the work on a thread in the owner's turn, unless its future is cancelled before. After
        ``close`` the future is returned cancelled."""
        job = _Job(owner, work, Future())
        with self._changed:
            if self._closed:
                job.done.cancel()
                return job.done
            self._waiting.setdefault(owner, deque()).append(job)
            self._num_waiting += 1
            if self._num_waiting > self._num_idle and len(self._threads) < self._num_threads:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return job.done

    def close(self, *, wait: bool = False) -> None:
        """Starts nothing more, and cancels waiting work. Repeatable. ``wait``: also waits for running
        work."""
        with self._changed:
            self._closed = True
            dropped = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
            self._changed.notify_all()
        for job in dropped:
            job.done.cancel()
        if wait:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._changed:
                self._running[job.owner] -= 1
                if not self._running[job.owner]:
                    del self._running[job.owner]
                self._changed.notify()

    def _next(self) -> _Job | None:
        with self._changed:
            while not self._closed:
                job = self._take()
                if job is not None:
                    return job
                self._num_idle += 1
                self._changed.wait()
                self._num_idle -= 1
        return None

    def _take(self) -> _Job | None:
        """The next job of the first owner in turn who has a thread left; None if there is none."""
        for owner, jobs in self._waiting.items():
            if self._running.get(owner, 0) < self._most_per_owner:
                self._waiting.move_to_end(owner)
                self._running[owner] = self._running.get(owner, 0) + 1
                self._num_waiting -= 1
                job = jobs.popleft()
                if not jobs:
                    del self._waiting[owner]
                return job
        return None
