"""Live pins: their deadlines, their budget, and the order in which they may be revoked.

It does not know why a pin exists. No operation is linear in the pins that it does not touch.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator

from continuum.jobs.job import BranchTip, Job, Place
from continuum.retention.tenant_shares import Givers, TenantShares
from engine.core.policy import Pin, PinEnd

AgeKey = tuple[Place, int]
"""The position of the pin's job, then the pin id: larger means younger, or of a worse priority."""


class PinTable:
    """All pins with their tips."""

    def __init__(self, num_blocks: int, tenant_share: float) -> None:
        """``num_blocks`` is the maximum for all pins together; ``tenant_share`` is the maximum share of that
        for one tenant, even if it is the only one."""
        self._budget = num_blocks
        self._tenant_budget = int(num_blocks * tenant_share)
        self._shares = TenantShares(num_blocks)
        self._tips: dict[int, BranchTip] = {}
        self._by_age: list[AgeKey] = []
        self._of_tenant: dict[str, list[AgeKey]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._released: deque[tuple[Pin, PinEnd]] = deque()
        self._claimed: set[int] = set()
        self._num_blocks = 0

    def __iter__(self) -> Iterator[Pin]:
        return (f.pin for f in self._tips.values() if f.pin is not None)

    def __len__(self) -> int:
        return len(self._tips)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def tip_of(self, pin: Pin) -> BranchTip:
        return self._tips[pin.pin_id]

    def reserve(self, job: Job, num_blocks: int, *, displace: bool = True) -> bool:
        """Whether the budgets allow this job a pin of ``num_blocks`` blocks.

        With ``displace``, pins that no turn has claimed are released if necessary, youngest first: those of
        any tenant that has more pinned blocks than the job's tenant would have, then those of younger jobs of
        the same tenant, so that the job that began first keeps its pins. Nothing is released unless that is
        enough.
        """
        missing = self._num_blocks + num_blocks - self._budget
        held = self._shares.held(_tenant_of(job))
        if missing <= 0 and held + num_blocks <= self._tenant_budget:
            return True
        displaced = self._displaced_by(job, num_blocks, missing, held) if displace else None
        for pin in displaced or ():
            self.release(pin, PinEnd.REVOKED)
        return displaced is not None

    def _displaced_by(self, job: Job, num_blocks: int, missing: int, held: int) -> list[Pin] | None:
        """Returns the pins to release: ``missing`` blocks for the budget, and enough for the cap of the job's
        tenant, which has ``held`` blocks. None if there are too few."""
        displaced = []
        tenant = _tenant_of(job)
        own = self._unclaimed(self._of_tenant.get(tenant, []), job.place)
        others = Givers(self._shares.richer_than(held + num_blocks), self._unclaimed_of)
        while missing > 0 or held + num_blocks > self._tenant_budget:
            within_cap = held + num_blocks <= self._tenant_budget
            pin = others.give(held, held + num_blocks) if within_cap else None
            if pin is None:
                pin = next(own, None)
                if pin is None:
                    return None
                held -= pin.num_blocks
            displaced.append(pin)
            missing -= pin.num_blocks
        return displaced

    def is_safe_from(self, pin: Pin, tenant: str | None) -> bool:
        """Whether this tenant has no claim to the pin: the pin's tenant has no more than its part of the
        budget."""
        return self._shares.is_safe(_tenant_of(self._tips[pin.pin_id].job), tenant or "")

    def add(self, pin: Pin, tip: BranchTip) -> None:
        tip.pin = pin
        self._tips[pin.pin_id] = tip
        age = (tip.place, pin.pin_id)
        insort(self._by_age, age)
        insort(self._of_tenant.setdefault(_tenant_of(tip.job), []), age)
        heapq.heappush(self._deadlines, (pin.deadline_s, pin.pin_id))
        self._count(tip, pin.num_blocks)

    def set_deadline(self, pin: Pin, deadline_s: float) -> None:
        """Move the deadline; the old heap entry is recognized as stale when it surfaces."""
        pin.deadline_s = deadline_s
        heapq.heappush(self._deadlines, (deadline_s, pin.pin_id))

    def claim(self, pin: Pin) -> None:
        """Stops the pin from expiring: its turn has arrived and waits."""
        self._claimed.add(pin.pin_id)

    def is_claimed(self, pin: Pin) -> bool:
        return pin.pin_id in self._claimed

    def release(self, pin: Pin, cause: PinEnd = PinEnd.RELEASED) -> None:
        """Ends the pin at the next ``due``."""
        self._released.append((pin, cause))

    def shrunk(self, pin: Pin, num_blocks_lost: int) -> None:
        self._count(self._tips[pin.pin_id], -num_blocks_lost)

    def ended(self, pin: Pin, cause: PinEnd) -> BranchTip:
        """Removes a pin that the scheduler has ended, and returns its tip."""
        tip = self._tips.pop(pin.pin_id)
        age = (tip.place, pin.pin_id)
        del self._by_age[bisect_left(self._by_age, age)]
        of_tenant = self._of_tenant[_tenant_of(tip.job)]
        del of_tenant[bisect_left(of_tenant, age)]
        if not of_tenant:
            del self._of_tenant[_tenant_of(tip.job)]
        self._claimed.discard(pin.pin_id)
        self._count(tip, -pin.num_blocks)
        tip.pin = None
        tip.pin_ended = cause
        return tip

    def due(self, now: float) -> Iterator[tuple[Pin, PinEnd]]:
        """Yields released and expired pins; the caller ends each before requesting the next."""
        while self._released:
            pin, cause = self._released.popleft()
            if pin.pin_id in self._tips:
                yield pin, cause
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            deadline_s, pin_id = heapq.heappop(deadlines)
            expired = self._alive(deadline_s, pin_id)
            if expired is not None:
                yield expired, PinEnd.EXPIRED

    def next_due_s(self) -> float | None:
        """Time of the next deadline that still applies; 0 if a released pin is due."""
        if self._released:
            return 0.0
        while self._deadlines:
            deadline_s, pin_id = self._deadlines[0]
            if self._alive(deadline_s, pin_id) is not None:
                return deadline_s
            heapq.heappop(self._deadlines)
        return None

    def youngest_first(self, after: Place | None = None) -> Iterator[Pin]:
        """Yields pins by the positions of their jobs, the largest first; only those after ``after`` if
        given."""
        return self._youngest_first(self._by_age, after)

    def _youngest_first(self, ages: list[AgeKey], after: Place | None) -> Iterator[Pin]:
        stop = -1
        if after is not None:
            stop = bisect_right(ages, after, key=lambda age: age[0]) - 1
        for place in range(len(ages) - 1, stop, -1):
            pin = self._tips[ages[place][1]].pin
            assert pin is not None
            yield pin

    def _unclaimed(self, ages: list[AgeKey], after: Place | None = None) -> Iterator[Pin]:
        return (pin for pin in self._youngest_first(ages, after) if not self.is_claimed(pin))

    def _unclaimed_of(self, tenant: str) -> Iterator[Pin]:
        return self._unclaimed(self._of_tenant[tenant])

    def _alive(self, deadline_s: float, pin_id: int) -> Pin | None:
        """The pin of this heap entry; None if it ended, was claimed, or its deadline moved."""
        tip = self._tips.get(pin_id)
        if tip is None or pin_id in self._claimed:
            return None
        pin = tip.pin
        return pin if pin is not None and pin.deadline_s == deadline_s else None

    def _count(self, tip: BranchTip, num_blocks: int) -> None:
        self._num_blocks += num_blocks
        self._shares.count(_tenant_of(tip.job), num_blocks)


def _tenant_of(job: Job) -> str:
    """The job's tenant; all jobs without a tenant count as one tenant."""
    return job.tenant or ""
