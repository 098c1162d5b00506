"""Tracks which core has which request: open ones, and ended turns that signals may still name."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from engine.records.messages import EngineCoreRequest

MAX_REMEMBERED_TURNS = 65_536


@dataclass(frozen=True, slots=True)
class LostRequests:
    """The open requests of a core that has died."""

    answered: list[str]
    """Requests whose client has received tokens."""
    unanswered: list[EngineCoreRequest]
    """Requests that another core can run from the start."""


class RequestLedger:
    """The requests of one API server process."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._unanswered: dict[str, EngineCoreRequest] = {}

    def sent(self, request: EngineCoreRequest, engine: int) -> None:
        """Note that the request was sent to this core."""
        self._open[request.request_id] = engine
        self._unanswered[request.request_id] = request

    def answered(self, request_id: str) -> None:
        """Note that the core has answered the request, with a token or with its end."""
        self._unanswered.pop(request_id, None)

    def ended(self, request_id: str) -> bool:
        """Note that the last output of a request has come; False if that is already known."""
        engine = self._open.pop(request_id, None)
        if engine is None:
            return False
        self._ended[request_id] = engine
        if len(self._ended) > MAX_REMEMBERED_TURNS:
            self._ended.popitem(last=False)
        return True

    def engine_of(self, request_id: str) -> int | None:
        """The core that has or had the request; None if it is not known."""
        engine = self._open.get(request_id)
        return self._ended.get(request_id) if engine is None else engine

    def by_engine(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """The open ones among these requests, by core."""
        shares: dict[int, list[str]] = defaultdict(list)
        for request_id in request_ids:
            if (engine := self._open.get(request_id)) is not None:
                shares[engine].append(request_id)
        return shares

    def lose(self, engine: int) -> LostRequests:
        """Remove and return the open requests of a core that has died; forget its ended turns."""
        lost = [request_id for request_id, its in self._open.items() if its == engine]
        for request_id in lost:
            del self._open[request_id]
        unanswered = [
            self._unanswered.pop(request_id) for request_id in lost if request_id in self._unanswered
        ]
        kept = {request.request_id for request in unanswered}
        for request_id in [request_id for request_id, its in self._ended.items() if its == engine]:
            del self._ended[request_id]
        return LostRequests([request_id for request_id in lost if request_id not in kept], unanswered)
