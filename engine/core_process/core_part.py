"""Plug-ins around the core's loop: each feature is a part, and all parts are called at the same moments.

Like ``engine.core.parts``, for what is not pure: threads, sockets, files, clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.core.parts import busy_at
from engine.core.request import Request
from engine.records.messages import EngineCoreOutput, EngineCoreRequest
from engine.records.reported_stats import SchedulerStats


class CorePart:
    """What one feature does around the loop, at each moment. All methods but ``opening``, ``made``,
    ``stopping``, ``persist`` and ``stop`` are called under the core's lock, and must not wait."""

    def opening(self, message: EngineCoreRequest) -> None:
        """Called when a request has come in, before it is queued. RequestError refuses it."""

    def made(self, request: Request) -> None:
        """Called with the request that was made of it. It may read files."""

    def queueing(self, request: Request) -> None:
        """Called before it is queued."""

    def opened(self, message: EngineCoreRequest) -> None:
        """Called when it was queued, before it can have a token or end."""

    def answered(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Called with outputs that go to clients; a part may add to them."""

    def request_ended(self, request: Request, now: float) -> None:
        """Called when a request has ended in any way. Must not raise."""

    def loaded(self, saved: Path, requests: Iterable[Request]) -> None:
        """Called when other weights have been loaded, with the folder of their saved KV and all requests."""

    def publish(self) -> None:
        """Publish what has happened since the last call."""

    def fill_stats(self, stats: SchedulerStats) -> None:
        """Add counts since the last call."""

    def utilities(self) -> Mapping[str, Callable[..., Any]]:
        """Methods that another process may call, by name."""
        return {}

    def stopping(self) -> None:
        """Called when the engine is about to stop, before the scheduler is closed. A step may be running."""

    def persist(self, now: float) -> None:
        """Complete what must survive: the engine stops, the scheduler is closed. A step may be running."""

    def stop(self) -> None:
        """Called when the engine has stopped and no step runs."""


class CoreParts:
    """The parts of one core, in the order in which they are called."""

    def __init__(self, parts: Iterable[CorePart | None]) -> None:
        """Take the parts; None is one that is off."""
        self.all = tuple(part for part in parts if part is not None)
        self._opening = self._with("opening")
        self._making = self._with("made")
        self._queueing = self._with("queueing")
        self._opened = self._with("opened")
        self._answering = self._with("answered")
        self._ending = self._with("request_ended")
        self._publishing = self._with("publish")

    def _with(self, moment: str) -> tuple[CorePart, ...]:
        return busy_at(moment, self.all, CorePart)

    def opening(self, message: EngineCoreRequest) -> None:
        for part in self._opening:
            part.opening(message)

    def made(self, request: Request) -> None:
        for part in self._making:
            part.made(request)

    def queueing(self, request: Request) -> None:
        for part in self._queueing:
            part.queueing(request)

    def opened(self, message: EngineCoreRequest) -> None:
        for part in self._opened:
            part.opened(message)

    def answered(self, outputs: Sequence[EngineCoreOutput]) -> None:
        for part in self._answering:
            part.answered(outputs)

    def request_ended(self, request: Request, now: float) -> None:
        for part in self._ending:
            part.request_ended(request, now)

    def loaded(self, saved: Path, requests: Iterable[Request]) -> None:
        for part in self.all:
            part.loaded(saved, requests)

    def publish(self) -> None:
        for part in self._publishing:
            part.publish()

    def fill_stats(self, stats: SchedulerStats) -> None:
        for part in self.all:
            part.fill_stats(stats)

    def utilities(self) -> dict[str, Callable[..., Any]]:
        return {name: method for part in self.all for name, method in part.utilities().items()}

    def stopping(self) -> None:
        for part in self.all:
            part.stopping()

    def persist(self, now: float) -> None:
        for part in self.all:
            part.persist(now)

    def stop(self) -> None:
        for part in self.all:
            part.stop()
