"""Which adapters the requests of a step have: at most ``max_loras`` at once."""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.request import Request

MAX_SET_ASIDE = 256
"""Waiting requests that are passed over in a step because of their adapters."""
MAX_WAIT_S = 10.0
"""After which a request that is set aside is overdue."""


class AdapterSlots:
    """The adapters of running requests, while waiting ones are admitted.

    Requests of further adapters are set aside, and those behind them go first. Once one that is set
    aside is overdue, only requests without an adapter go first: those that run end, and make room.
    """

    def __init__(self, max_loras: int | None, running: Iterable[Request], now: float) -> None:
        """``max_loras``: None if there are no adapters."""
        self._max_loras = max_loras
        self._active: set[str] = set()
        if max_loras is not None:
            self._active = {request.adapter for request in running if request.adapter is not None}
        self._now = now
        self._one_is_overdue = False
        self._num_set_aside = 0

    @property
    def may_go_on(self) -> bool:
        """Whether to look behind a request that was set aside."""
        return self._num_set_aside < MAX_SET_ASIDE

    def sets_aside(self, request: Request) -> bool:
        """Whether the request may not be admitted now because of its adapter."""
        if self._max_loras is None or (adapter := request.adapter) is None:
            return False
        is_active = adapter in self._active
        if not self._one_is_overdue and (is_active or len(self._active) < self._max_loras):
            return False
        waited_s = self._now - request.arrival_time
        self._one_is_overdue |= not is_active and waited_s > MAX_WAIT_S
        self._num_set_aside += 1
        return True

    def admitted(self, request: Request) -> None:
        if request.adapter is not None:
            self._active.add(request.adapter)
