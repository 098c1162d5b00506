"""Predicts how much work jobs are: the service time of jobs of a kind, times the share of the pool that their
first prompts take.

A kind is identified by a hash of a prompt's first blocks, since an agent's system prompt comes before its
task. The first jobs of new kinds share one group. Within a kind all jobs get the same forecast: turns and
tokens of one job predict less than the order by age. It does not know the queue.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from continuum.learning.program_stats import Memoryfulness
from estimator.kinds import Kind, forget_one
from estimator.rate_belief import RateGroup, exposures_per_end

MAX_KINDS = 256
"""Maximum number of kinds; beyond it, one is forgotten (``forget_one``)."""
MAX_ENDS = 256.0
"""When this many jobs of a kind have ended, its counts are halved, so that old jobs count less."""
MAX_TURNS = 4096.0
"""Maximum count of turns of all kinds, which limits the time between updates."""
UPDATE_SHARE = 0.125
"""The forecast is updated after this many more turns, as a share of the turns before."""


class _Kind:
    """Jobs of one kind."""

    __slots__ = ("excess_s", "num_jobs", "num_tokens", "seen")

    def __init__(self, excess_s: float) -> None:
        self.seen = RateGroup()
        """Seconds of service, and the number of ended jobs."""
        self.num_jobs = self.num_tokens = 0.0
        """Number of jobs that began, and the total tokens of their first prompts."""
        self.excess_s = excess_s
        """Work of a job of this kind beyond that of a usual job, at the last update."""

    def begin(self, num_tokens: int) -> None:
        self.num_jobs += 1
        self.num_tokens += num_tokens

    def end(self, count: int, served_s: float) -> None:
        """Counts a job that ended after this many seconds of service; a ``count`` of -1 undoes that."""
        seen = self.seen
        seen.num_ends = max(0.0, seen.num_ends + count)
        seen.ended = max(0.0, seen.ended + count * served_s)
        seen.ended_squared = max(0.0, seen.ended_squared + count * served_s * served_s)
        if seen.num_ends > MAX_ENDS:
            seen.fade()
            self.num_jobs = self.num_jobs / 2
            self.num_tokens = self.num_tokens / 2


class JobCourse:
    """The course of one job, for the forecast of its kind."""

    __slots__ = ("_ended", "_ended_s", "_forecast", "_kind", "_num_turns", "_served_s")

    def __init__(self, kind: _Kind, forecast: WorkForecast) -> None:
        self._kind = kind
        self._forecast = forecast
        self._num_turns = 0
        self._served_s = self._ended_s = 0.0
        self._ended = False

    def begin_turn(self) -> None:
        """Counts its next turn; if an earlier turn was counted as the last, undoes that."""
        if self._ended:
            self._count_end(-1)
        self._ended = False
        self._num_turns += 1

    def end_turn(self, service_s: float) -> None:
        """Adds a turn that took this long from its first step to its end."""
        self._served_s += service_s
        self._kind.seen.exposure += service_s
        self._forecast.count_turn()

    def looks_finished(self) -> None:
        """Counts the job as ended: its client announced the end, or it answered without calling a tool."""
        if not self._ended and self._num_turns:
            self._ended = True
            self._ended_s = self._served_s
            self._count_end(1)

    def _count_end(self, count: int) -> None:
        self._forecast.lengths.observe_job(self._num_turns, count)
        self._kind.end(count, self._ended_s)

    @property
    def excess_s(self) -> float:
        """How much more work jobs of its kind are than usual jobs; negative if they are less."""
        return self._kind.excess_s


class WorkForecast:
    """Kinds of jobs, and what was learned from them. Forecasts are constant between updates."""

    def __init__(self) -> None:
        self.lengths = Memoryfulness()
        """How well the turns that a job has had predict its remaining turns."""
        self.num_lessons = 0
        self._kinds: OrderedDict[Kind, _Kind] = OrderedDict()
        self._first_ones = _Kind(0.0)
        self._usual_s = self._usual_tokens = 0.0
        """Means over all jobs: seconds of service, and tokens in the first prompt."""
        self._num_turns = self._num_until_update = 0.0

    def course(self, name: Kind | None, num_tokens: int) -> JobCourse:
        """Returns the course of a new job whose first prompt has this many tokens. ``name`` is None if its
        kind is not known."""
        kind = self._first_ones
        if name is not None and name in self._kinds:
            kind = self._kinds[name]
            self._kinds.move_to_end(name)
        elif name is not None:
            self._remember(name, num_tokens)
        kind.begin(num_tokens)
        return JobCourse(kind, self)

    def excess_s(self, name: Kind | None) -> float:
        """The forecast for a request that may become a job, from which nothing is learned yet; 0 if its kind
        is not known."""
        kind = None if name is None else self._kinds.get(name)
        return 0.0 if kind is None else kind.excess_s

    def count_turn(self) -> None:
        """Counts an ended turn of any job, and updates the forecast when that is due."""
        self._num_turns = min(MAX_TURNS, self._num_turns + 1)
        self._num_until_update -= 1
        if self._num_until_update <= 0:
            self._learn()
            self._num_until_update = UPDATE_SHARE * self._num_turns

    def _remember(self, name: Kind, num_tokens: int) -> None:
        """Adds a kind. Until the next update only the size of its first prompt distinguishes it from
        others."""
        excess_s = self._usual_s * (num_tokens / self._usual_tokens - 1) if self._usual_tokens else 0.0
        self._kinds[name] = _Kind(excess_s)
        if len(self._kinds) > MAX_KINDS:
            forget_one(self._kinds)

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
