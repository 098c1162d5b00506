"""The jobs of a trace: outlines of all jobs, and all records of some.

A trace may have more than a page can show and memory can hold: then a first pass chooses the jobs that are
worth showing, and a second one keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eval.trace.analysis.jobs import GapLife, JobLife, PinLife, TurnEnd, TurnLife, job_life, job_of
from eval.trace.page.sample import evenly

MAX_JOBS = 500
MAX_TURNS = 10_000
"""Most turns of all jobs on a page together."""
MAX_TURNS_OF_JOB = 1000


@dataclass(slots=True)
class Sketch:
    """A job's times and number of turns."""

    began_s: float
    ended_s: float
    num_turns: int = 0
    is_open: bool = False
    awaits_turn: bool = False
    """Whether its last turn called tools and the trace does not show what followed."""

    @property
    def wall_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(slots=True)
class _Kept:
    turns: list[TurnLife] = field(default_factory=list)
    gaps: list[GapLife] = field(default_factory=list)
    pins: list[PinLife] = field(default_factory=list)


class JobBook:
    """Takes turns, gaps and pins as they end."""

    def __init__(self, chosen: frozenset[str] | None = None) -> None:
        """``chosen``: the jobs to keep in full; None: all jobs, unless there are too many."""
        self.sketches: dict[str, Sketch] = {}
        self._chosen = chosen
        self._kept: dict[str, _Kept] = {}
        self._num_kept = 0
        self.too_many = False
        """Whether nothing is kept because there are more jobs than a page shows."""

    def turn(self, turn: TurnLife) -> None:
        job_id = job_of(turn)
        sketch = self.sketches.get(job_id)
        if sketch is None:
            sketch = self.sketches[job_id] = Sketch(turn.arrived_s, turn.ended_s)
        sketch.began_s = min(sketch.began_s, turn.arrived_s)
        if turn.ended_s > sketch.ended_s:
            sketch.ended_s = turn.ended_s
            sketch.awaits_turn = False
        sketch.num_turns += 1
        sketch.is_open = sketch.is_open or turn.end is TurnEnd.OPEN
        kept = self._kept_of(job_id)
        if kept is not None and len(kept.turns) < MAX_TURNS_OF_JOB:
            kept.turns.append(turn)
            self._num_kept += 1
            self._forget_if_too_many()

    def gap(self, gap: GapLife) -> None:
        sketch = self.sketches.get(gap.job_id)
        if sketch is not None and gap.started_s >= sketch.ended_s:
            sketch.awaits_turn = gap.awaits_turn
        kept = self._kept_of(gap.job_id)
        if kept is not None and len(kept.gaps) < MAX_TURNS_OF_JOB:
            kept.gaps.append(gap)

    def pin(self, pin: PinLife) -> None:
        kept = self._kept_of(pin.job_id)
        if kept is not None and len(kept.pins) < MAX_TURNS_OF_JOB:
            kept.pins.append(pin)

    def finished(self, job_id: str, now: float) -> None:
        """Notes that no turn of this job will follow."""
        if job_id in self.sketches:
            self.sketches[job_id].awaits_turn = False

    def cut_off(self) -> None:
        """Marks jobs whose calls were running as open, as the trace has no end."""
        for sketch in self.sketches.values():
            sketch.is_open = sketch.is_open or sketch.awaits_turn

    def _kept_of(self, job_id: str) -> _Kept | None:
        if self.too_many or (self._chosen is not None and job_id not in self._chosen):
            return None
        return self._kept.setdefault(job_id, _Kept())

    def _forget_if_too_many(self) -> None:
        if self._chosen is None and (self._num_kept > MAX_TURNS or len(self.sketches) > MAX_JOBS):
            self.too_many = True
            self._kept.clear()

    def jobs(self) -> list[JobLife]:
        """Returns the jobs kept in full, in the order of their arrival."""
        jobs = [
            job_life(job_id, kept.turns, kept.gaps, kept.pins)
            for job_id, kept in self._kept.items()
            if kept.turns
        ]
        return sorted(jobs, key=lambda job: (job.began_s, job.job_id))


def choose_jobs(sketches: dict[str, Sketch]) -> frozenset[str]:
    """Chooses the longest jobs, up to half of what a page shows, and an even sample of the others."""
    slowest = sorted(sketches, key=lambda job_id: (-sketches[job_id].wall_s, job_id))
    chosen = _within(slowest, sketches, MAX_JOBS // 2, MAX_TURNS // 2)
    others = sorted(sketches.keys() - chosen, key=lambda job_id: (sketches[job_id].began_s, job_id))
    num_turns = sum(min(sketches[job_id].num_turns, MAX_TURNS_OF_JOB) for job_id in others)
    fitting = MAX_JOBS // 2
    if num_turns > MAX_TURNS // 2:
        fitting = min(fitting, len(others) * (MAX_TURNS // 2) // num_turns)
    return chosen | _within(evenly(others, fitting), sketches, fitting, MAX_TURNS // 2)


def _within(
    job_ids: Sequence[str], sketches: dict[str, Sketch], max_jobs: int, max_turns: int
) -> frozenset[str]:
    """Returns the first of them that fit."""
    chosen: list[str] = []
    num_turns = 0
    for job_id in job_ids[:max_jobs]:
        num_turns += min(sketches[job_id].num_turns, MAX_TURNS_OF_JOB)
        if num_turns > max_turns:
            break
        chosen.append(job_id)
    return frozenset(chosen)
