"""How much work jobs are: how long those of a kind are served, times the part of the pool that they
begin with.

A kind is identified by a hash of a prompt's first blocks: an agent's system prompt comes before its
task. A job that is the first of its kind is a kind of its own. Within a kind all jobs are alike:
what turns and tokens say of one job helps less than the order by age. It knows no queue.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable

from continuum.learning.program_stats import Memoryfulness
from estimator.rate_belief import RateGroup, exposures_per_end

MAX_KINDS = 256
"""Maximum number of kinds; beyond it, the kind not seen for longest is forgotten."""
MAX_ENDS = 256.0
"""When this many jobs of a kind have ended, its counts are halved, so that old ones count less."""
MAX_TURNS = 4096.0
"""The same for turns, of all kinds."""
UPDATE_SHARE = 0.125
"""The forecast is updated after this many more turns, as a share of those before."""


class _Kind:
    """Jobs of one kind."""

    __slots__ = ("excess_s", "num_jobs", "num_tokens", "seen")

    def __init__(self, excess_s: float) -> None:
        self.seen = RateGroup()
        """Seconds of service, and the number of jobs that ended."""
        self.num_jobs = self.num_tokens = 0.0
        """Number of jobs that began, and the tokens in their first prompts together."""
        self.excess_s = excess_s
        """Work of a job beyond that of a usual one, as of the last update."""

    def begin(self, num_tokens: int) -> None:
        self.num_jobs += 1
        self.num_tokens += num_tokens

    def end(self, count: int, served_s: float) -> None:
        """A job ended that was served for this long; -1 takes an earlier one back."""
        seen = self.seen
        seen.num_ends = max(0.0, seen.num_ends + count)
        seen.ended = max(0.0, seen.ended + count * served_s)
        seen.ended_squared = max(0.0, seen.ended_squared + count * served_s * served_s)
        if seen.num_ends > MAX_ENDS:
            seen.fade()
            self.num_jobs, self.num_tokens = self.num_jobs / 2, self.num_tokens / 2


class JobCourse:
    """One job so far."""

    __slots__ = ("_ended", "_ended_s", "_forecast", "_kind", "_num_turns", "_served_s")

    def __init__(self, kind: _Kind, forecast: WorkForecast) -> None:
        self._kind = kind
        self._forecast = forecast
        self._num_turns = 0
        self._served_s = self._ended_s = 0.0
        self._ended = False

    def begin_turn(self) -> None:
        """Its next turn came; if an earlier one looked like the last, it was not."""
        if self._ended:
            self._count_end(-1)
        self._ended = False
        self._num_turns += 1

    def end_turn(self, service_s: float) -> None:
        """The turn took this long from its first step to its end."""
        self._served_s += service_s
        self._kind.seen.exposure += service_s
        self._forecast.count_turn()

    def looks_finished(self) -> None:
        """Its client said that it is done, or it answered without calling a tool."""
        if not self._ended and self._num_turns:
            self._ended, self._ended_s = True, self._served_s
            self._count_end(1)

    def _count_end(self, count: int) -> None:
        self._forecast.lengths.observe_job(self._num_turns, count)
        self._kind.end(count, self._ended_s)

    @property
    def excess_s(self) -> float:
        """How much more work jobs of its kind are than usual ones; negative if they are less."""
        return self._kind.excess_s


class WorkForecast:
    """Kinds of jobs, and what was learned from them. Forecasts stay constant between updates."""

    def __init__(self) -> None:
        self.lengths = Memoryfulness()
        """What the turns that a job has had say of those to come."""
        self.num_lessons = 0
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._first_ones = _Kind(0.0)
        self._usual_s = self._usual_tokens = 0.0
        """Means over all jobs: seconds of service, and tokens in the first prompt."""
        self._num_turns = self._num_until_update = 0.0

    def course(self, name: Hashable | None, num_tokens: int) -> JobCourse:
        """The course of a job that begins with a prompt of this many tokens; None if its kind is
        not known."""
        kind = self._kinds.get(name)
        if kind is not None:
            self._kinds.move_to_end(name)
        else:
            if name is not None:
                self._remember(name, num_tokens)
            kind = self._first_ones
        kind.begin(num_tokens)
        return JobCourse(kind, self)

    def excess_s(self, name: Hashable | None) -> float:
        """The same for a request that may become a job, from which nothing is learned yet; 0 if its
        kind is not known."""
        kind = self._kinds.get(name)
        return 0.0 if kind is None else kind.excess_s

    def count_turn(self) -> None:
        """A turn of some job has ended."""
        self._num_turns = min(MAX_TURNS, self._num_turns + 1)
        self._num_until_update -= 1
        if self._num_until_update <= 0:
            self._learn()
            self._num_until_update = UPDATE_SHARE * self._num_turns

    def _remember(self, name: Hashable, num_tokens: int) -> None:
        """Until the next update only its size distinguishes it from others."""
        excess_s = self._usual_s * (num_tokens / self._usual_tokens - 1) if self._usual_tokens else 0.0
        self._kinds[name] = _Kind(excess_s)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)

    def _learn(self) -> None:
        self.num_lessons += 1
        kinds = [kind for kind in (self._first_ones, *self._kinds.values()) if kind.num_jobs]
        self._usual_tokens = math.fsum(kind.num_tokens for kind in kinds) / math.fsum(
            kind.num_jobs for kind in kinds
        )
        # Before any job ended, one is assumed to end now.
        num_ends = max(1.0, math.fsum(kind.seen.num_ends for kind in kinds))
        self._usual_s = math.fsum(kind.seen.exposure for kind in kinds) / num_ends
        services_s = exposures_per_end([kind.seen for kind in kinds]) or [self._usual_s] * len(kinds)
        for kind, service_s in zip(kinds, services_s, strict=True):
            size = kind.num_tokens / kind.num_jobs / self._usual_tokens
            kind.excess_s = service_s * size - self._usual_s
