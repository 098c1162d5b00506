"""Which pins a request may revoke (``docs/design/pins.md``). This module decides; the scheduler revokes.

A tenant's pins within its part of the budget are safe from other tenants, unless nothing else can run or a
request is overdue. All pins of jobs of a worse priority may be revoked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile

from continuum.jobs.job import Turn
from continuum.learning.learners import Learners
from continuum.queueing.aging import Aging
from continuum.retention.pins import PinTable
from engine.core.policy import Pin
from engine.core.request import Request, RequestStatus

SOON = 0.5
"""A turn that is back by a time with more than this probability is expected by then."""
MANY_PINS = 128
"""Beyond this many pins, the pause after a search grows faster than linearly, so that searches take a smaller
share of the time the more pins there are."""


class RevocationRule:
    """Selects the pins that a request may revoke, cheapest first."""

    def __init__(
        self,
        pins: PinTable,
        learners: Learners,
        *,
        block_size: int,
        has_windows: bool,
        aging: Aging,
        search_backoff_s: float,
    ) -> None:
        """``search_backoff_s``: the pause after a search, per pin that it examined. ``has_windows``: a
        shortened pin may be useless, as the windows before its new end were freed."""
        self._pins = pins
        self._tools = learners.tools
        self._kv_cost = learners.kv_cost
        self._block_size = block_size
        self._has_windows = has_windows
        self._aging = aging
        self._pause_s = search_backoff_s
        self._search_from_s: dict[str, float] = {}
        """When a waiting request that found too few blocks may search again."""

    def forget(self, request: Request) -> None:
        """Forgets a request that no longer waits."""
        self._search_from_s.pop(request.request_id, None)

    def revocable_for(
        self, requester: Request, turn: Turn | None, now: float, last_resort: bool
    ) -> Iterator[Pin]:
        """Yields the pins that the requester may revoke. ``turn`` is the requester's; None if it belongs to
        no job. ``last_resort``: nothing else can run. A job that waits for the requester's keeps its pins
        until then."""
        pins = self._candidates(requester, turn, now, last_resort)
        above = [] if turn is None else list(turn.job.ancestors())
        if not above:
            yield from pins
            return
        theirs = []
        for pin in pins:
            if self._pins.tip_of(pin).job in above:
                theirs.append(pin)
            else:
                yield pin
        if last_resort:
            yield from theirs

    def _candidates(
        self, requester: Request, turn: Turn | None, now: float, last_resort: bool
    ) -> Iterator[Pin]:
        running = requester.status is RequestStatus.RUNNING
        is_overdue = self._aging.is_overdue(requester)
        has_host_tier = self._kv_cost.has_host_tier
        if last_resort or is_overdue or (running and has_host_tier):
            yield from self._all_pins(requester, turn)
        elif running:
            # The requester grows by a block; otherwise it is preempted, and its whole turn is recomputed.
            spared_s = self._kv_cost.prefill_s(requester.num_computed_tokens)
            for pin in self._younger_pins(requester, turn):
                num_lost = pin.num_prefix_blocks if self._has_windows else 1
                if self._gives_way(pin, num_lost, requester, spared_s, now):
                    yield pin
        elif has_host_tier:
            # Loading an offloaded copy is so cheap that even a new job need not wait for others' tools.
            pins = self._within_reach(self._pins.youngest_first(), requester, turn)
            unclaimed = (pin for pin in pins if not self._pins.is_claimed(pin))
            yield from self._cheap_pins(unclaimed, requester, now)
        elif turn is not None and turn.number > 1:
            yield from self._cheap_pins(self._younger_pins(requester, turn), requester, now)
        else:
            pins = self._younger_pins(requester, turn)  # those of the worst priority first
            yield from takewhile(lambda pin: self._is_worse(pin, requester), pins)

    def _all_pins(self, requester: Request, turn: Turn | None) -> Iterator[Pin]:
        """Yields unclaimed pins first, the youngest job's first; then other tenants' pins within their part
        of the budget; then claimed pins; the requester's own pin, whose blocks it will read, last."""
        own = turn.pin if turn is not None else None
        tenant = _tenant_of(requester, turn)
        safe = []
        claimed = []
        for pin in self._pins.youngest_first():
            if pin is own:
                continue
            if self._pins.is_claimed(pin):
                claimed.append(pin)
            elif self._pins.is_safe_from(pin, tenant):
                safe.append(pin)
            else:
                yield pin
        yield from safe
        yield from claimed
        if own is not None:
            yield own

    def _younger_pins(self, requester: Request, turn: Turn | None) -> Iterator[Pin]:
        rank = turn.job.rank if turn is not None else requester.arrival_time
        pins = self._pins.youngest_first((requester.priority, rank))
        return self._within_reach(pins, requester, turn)

    def _is_worse(self, pin: Pin, requester: Request) -> bool:
        """Whether the pin is for a job of a worse priority."""
        return self._pins.tip_of(pin).place[0] > requester.priority

    def _within_reach(self, pins: Iterator[Pin], requester: Request, turn: Turn | None) -> Iterator[Pin]:
        tenant = _tenant_of(requester, turn)
        return (pin for pin in pins if not self._pins.is_safe_from(pin, tenant))

    def _cheap_pins(self, pins: Iterable[Pin], requester: Request, now: float) -> Iterator[Pin]:
        """Yields pins of worse priority, and those whose expected loss is less than the requester's wait
        until now.

        If a requester takes all of them and still has too few blocks, it searches again only after a pause: a
        search among thousands of pins takes longer than a step.
        """
        if now < self._search_from_s.get(requester.request_id, now):
            return
        waited_s = now - self._aging.since_s(requester)
        num_seen = 0
        for pin in pins:
            num_seen += 1
            if self._gives_way(pin, pin.num_prefix_blocks, requester, waited_s, now):
                yield pin
        pause_s = num_seen * self._pause_s * max(1.0, num_seen / MANY_PINS)
        self._search_from_s[requester.request_id] = now + pause_s

    def _gives_way(self, pin: Pin, num_blocks: int, requester: Request, worth_s: float, now: float) -> bool:
        """Whether the pin is for a job of a worse priority, or whether losing ``num_blocks`` of its blocks is
        expected to cost less than ``worth_s``: the cost to restore them, times the probability that the turn
        returns. A turn that waits already, or is expected back before its loss is repaid, keeps its pin."""
        tip = self._pins.tip_of(pin)
        if tip.place[0] > requester.priority:
            return True
        lost_s = self._kv_cost.restore_s(num_blocks * self._block_size)
        if self._pins.is_claimed(pin):
            return False
        repaid_s = now + self._kv_cost.delay_s(lost_s, now)
        if self._tools.return_probability(tip, repaid_s, now) > SOON:
            return False
        if lost_s >= worth_s:
            lost_s *= self._tools.return_probability(tip, pin.deadline_s, now)
        return lost_s < worth_s


def _tenant_of(requester: Request, turn: Turn | None) -> str | None:
    if turn is not None:
        return turn.job.tenant
    return requester.job.tenant if requester.job is not None else None
