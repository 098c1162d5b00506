"""Keeps aging, admission and ranks in sync with the waiting requests, and decides which request is next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from continuum.config import ContinuumConfig
from continuum.jobs.job import Turn
from continuum.jobs.turns import Turns
from continuum.queueing.admission import WorkingSet
from continuum.queueing.aging import Aging
from continuum.queueing.begin_rate import BeginRate
from continuum.queueing.order import JobRanks, waiting_key
from engine.core.policy import WaitingKey
from engine.core.request import Request


class JobQueue:
    """Answers the scheduler's questions about the order of requests
    (``engine.core.policy.QueuePolicy``)."""

    def __init__(
        self,
        config: ContinuumConfig,
        turns: Turns,
        ranks: JobRanks,
        working_set: WorkingSet,
        aging: Aging,
        on_parked: Callable[[Turn, WorkingSet, float], None],
        *,
        patience_s: float,
    ) -> None:
        """``on_parked`` is called once for each new job that has to wait until its working set fits.
        ``patience_s``: see ``Tuning``; infinite without a host tier."""
        self._patience_s = patience_s
        self._config = config
        self._turns = turns
        self._ranks = ranks
        self._working_set = working_set
        self._aging = aging
        self._on_parked = on_parked
        self._begin_rate = BeginRate()
        self._changed: list[Request] = []
        self._patience = Aging()
        """Later turns of jobs, until they have waited long enough to be ordered with warm turns."""

    # ---- a request comes and goes ----

    def arrived(self, request: Request, turn: Turn | None) -> None:
        """Adds a request that waits from now on; a turn that repeats another one has waited since that one
        did."""
        max_wait_s = self._max_wait_s(request, turn)
        if turn is None:
            self._aging.arrived(request, max_wait_s)
            return
        self._aging.arrived(request, max_wait_s, turn.waits_since_s)
        if turn.number > 1 and self._patience_s < math.inf:
            self._patience.arrived(request, self._patience_s, turn.waits_since_s)
        self._ranks.rank(turn)

    def _max_wait_s(self, request: Request, turn: Turn | None) -> float:
        """The smallest of the aging bounds that apply to the request. Half of its deadline is left for its
        computation."""
        config = self._config
        if turn is None and request.job is not None and request.job.prewarms:
            return math.inf
        bounds_s = [config.max_wait_s]
        if turn is not None and turn.number > 1:
            bounds_s.append(config.max_return_wait_s)
        if request.job is not None and request.job.is_silent:
            bounds_s.append(config.max_silent_wait_s)
        if request.job is not None and request.job.deadline_s is not None:
            bounds_s.append(request.job.deadline_s / 2)
        return min(bounds_s)

    def moved_up(self, turn: Turn) -> None:
        """Reorders a turn that has taken the place of the turn that it repeats."""
        self.arrived(turn.request, turn)
        self._changed.append(turn.request)

    def lost_pin(self, turns: Iterable[Turn]) -> None:
        """Reorders the waiting ones of these turns as cold turns, since their pinned blocks went to other
        requests."""
        self._changed.extend(turn.request for turn in turns if turn.num_cached_tokens is None)

    def admitted(self, request: Request, turn: Turn | None, now: float) -> None:
        self._aging.admitted(request)
        if self._working_set.is_parked(request):
            self._begin_rate.begun(now)
        self._working_set.came(request, turn)

    def gone(self, request: Request) -> None:
        turn = self._turns.get(request)
        if turn is not None and turn.job.parent is not None:  # a sibling may go on for the parent now
            self._changed.extend(filter(self._working_set.is_parked, turn.job.parent.waiting_for()))
        self._aging.gone(request)
        self._patience.gone(request)
        self._working_set.went(request)

    # ---- called by the scheduler ----

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        turn = self._turns.get(request)
        is_overdue = self._aging.queued(request, now)
        is_parked = not is_overdue and turn is not None and self._working_set.parks(turn)
        return waiting_key(
            request,
            turn,
            is_overdue=is_overdue,
            is_parked=is_parked,
            stands_warm=self._patience.is_exhausted(request, now),
        )

    def changed_keys(self, now: float) -> Iterable[Request]:
        self._changed.extend(self._aging.newly_overdue(now))
        self._changed.extend(self._patience.newly_overdue(now))
        if self._config.work_weight:
            self._changed.extend(turn.request for turn in self._ranks.rank_again(self._turns))
        if not self._changed:
            return ()
        changed = self._changed
        self._changed = []
        return changed

    def may_admit(self, request: Request, now: float) -> bool:
        turn = self._turns.get(request)
        if turn is None or self._aging.is_overdue(request) or self._working_set.admits(turn, now):
            return True
        if self._working_set.park(turn):
            if self._working_set.num_parked == 1:
                self._begin_rate.wait_began()
            self._changed.append(request)
            self._on_parked(turn, self._working_set, now)
        return False

    def late_by_s(self, request: Request, now: float) -> float | None:
        """Seconds by which a new job, which has just come, is expected to begin later than it may; None if it
        may be in time.

        Nothing is said of the job that begins next, of one that repeats a request and keeps its place, and of
        one that began elsewhere: its prompt has replies.
        """
        job = request.job
        turn = self._turns.get(request)
        deadline_s = None if job is None else job.deadline_s
        bounds_s = [bound for bound in (self._config.max_first_wait_s, deadline_s) if bound is not None]
        if not bounds_s or job is None or turn is None or turn.repeats is not None or job.num_replies:
            return None
        num_before = self._num_parked_before(request) if self._working_set.is_parked(request) else 0
        wait_s = self._begin_rate.wait_s(num_before) if num_before else None
        return None if wait_s is None or wait_s <= min(bounds_s) else wait_s - min(bounds_s)

    def _num_parked_before(self, request: Request) -> int:
        """About how many parked jobs begin before this one: those of its tenant that stand before it, and as
        many of each other tenant."""
        own_key = self._parked_key(request)
        before = [other for other in self._working_set.parked() if self._parked_key(other) < own_key]
        by_tenant = Counter(other.tenant for other in before)
        num_own = by_tenant.pop(request.tenant, 0)
        return num_own + sum(min(number, num_own + 1) for number in by_tenant.values())

    def _parked_key(self, request: Request) -> WaitingKey:
        return waiting_key(request, self._turns.get(request), is_parked=True)

    def is_overdue(self, request: Request) -> bool:
        return self._aging.is_overdue(request)

    def may_pass(self, request: Request) -> bool:
        """Whether a request may start before an earlier one that does not fit.

        A warm turn retains memory that only running it can free. So it must not wait for a cold turn, unless
        that is overdue: then the cold turn may take the warm turn's blocks.
        """
        turn = self._turns.get(request)
        return turn is not None and turn.warm and not self._aging.is_exceeded

    def victim(self, running: Sequence[Request]) -> Request:
        """The request to preempt: one of the worst priority, of a job without pins if possible, of the job
        with the largest rank, with the fewest computed tokens on a tie."""

        def worth(request: Request) -> tuple[int, bool, float, int]:
            turn = self._turns.get(request)
            num_computed = request.num_computed_tokens
            if turn is None:
                return (-request.priority, False, -request.arrival_time, num_computed)
            return (-request.priority, turn.job.num_pins > 0, -turn.job.rank, num_computed)

        return min(reversed(running), key=worth)
