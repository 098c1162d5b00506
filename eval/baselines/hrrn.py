"""hrrn: the highest response ratio next, aged by tokens, as in SGLang's scheduler (sglang#32911)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.policy import CachedTokens, FcfsPolicy, Pin, WaitingKey
from engine.core.request import Request

MAX_COMPARED = 128
"""SGLang's bound: longer queues are first come, first served, as comparing looks up every prompt again."""


@dataclass(slots=True)
class _Waiting:
    """A request in the queue."""

    request: Request
    num_computed_before: int
    """Prefill tokens that the whole engine had computed when it was queued."""
    num_to_compute: int


class HrrnPolicy(FcfsPolicy):
    """Orders by prefill tokens computed while a request waited, over its own uncached tokens, the greatest
    first.

    At a constant speed of prefill this is the order of the classic (wait + service) / service. Tokens of all
    tiers count as cached. The request admitted last is preempted, and begins to wait again. Nothing is
    pinned.

    Unlike in SGLang, a request's prefill counts when it is admitted, not step by step; prompts are looked up
    when one is admitted or ends, not in each step; and no request is deferred for a queued one with the same
    beginning.
    """

    name = "hrrn"
    _cached_tokens: CachedTokens

    def __init__(self, context: object = None) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._num_computed = 0
        self._is_compared = True
        self._is_outdated = False
        """Whether a request was admitted or has ended since the keys were made."""

    def see_cache(self, cached_tokens: CachedTokens) -> None:
        self._cached_tokens = cached_tokens

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        waiting = self._waiting.get(request.request_id)
        if waiting is None:
            waiting = _Waiting(request, self._num_computed, self._num_to_compute(request))
            self._waiting[request.request_id] = waiting
            self._count()
        if not self._is_compared:
            return (0.0,)
        return (-(self._num_computed - waiting.num_computed_before) / waiting.num_to_compute,)

    def _num_to_compute(self, request: Request) -> int:
        return max(1, request.num_tokens - sum(self._cached_tokens(request)))

    def _count(self) -> None:
        """Updates ``_is_compared`` after a change of the queue's length."""
        is_compared = len(self._waiting) <= MAX_COMPARED
        self._is_outdated |= is_compared is not self._is_compared
        self._is_compared = is_compared

    def changed_keys(self, now: float) -> Iterable[Request]:
        if not self._is_outdated:
            return ()
        self._is_outdated = False
        if self._is_compared:
            for waiting in self._waiting.values():
                waiting.num_to_compute = self._num_to_compute(waiting.request)
        return [waiting.request for waiting in self._waiting.values()]

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        self._num_computed += self._waiting.pop(request.request_id).num_to_compute
        self._is_outdated |= self._is_compared
        self._count()
        return ()

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        self.on_request_gone(request, now)
        return None

    def on_request_gone(self, request: Request, now: float) -> None:
        self._waiting.pop(request.request_id, None)
        self._is_outdated |= self._is_compared
        self._count()
