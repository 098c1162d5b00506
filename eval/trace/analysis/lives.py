"""Reads the records of a whole trace from a file into a sink, or keeps them in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from eval.trace.analysis.jobs import GapLife, JobLife, PinLife, TurnLife, job_life
from eval.trace.analysis.life_reader import LifeReader, LifeSink
from eval.trace.analysis.pool import StepLife
from tracing.events import TraceHeader
from tracing.late_names import read_named_trace
from tracing.reader import TraceReport

OfJob = TypeVar("OfJob", GapLife, PinLife)


@dataclass(slots=True)
class Lives:
    """All records of a trace, in memory; a ``LifeSink``."""

    with_steps: bool = True
    turns: list[TurnLife] = field(default_factory=list)
    """Turns in the order in which they ended."""
    gaps: list[GapLife] = field(default_factory=list)
    pins: list[PinLife] = field(default_factory=list)
    steps: list[StepLife] = field(default_factory=list)
    finished_s: dict[str, float] = field(default_factory=dict)
    """Time at which each job finished."""
    only_job: str | None = None
    """The only job to keep; None: all jobs."""

    def turn(self, turn: TurnLife) -> None:
        if self.only_job in (None, turn.job_id):
            self.turns.append(turn)

    def gap(self, gap: GapLife) -> None:
        if self.only_job in (None, gap.job_id):
            self.gaps.append(gap)

    def pin(self, pin: PinLife) -> None:
        if self.only_job in (None, pin.job_id):
            self.pins.append(pin)

    def step(self, step: StepLife) -> None:
        if self.with_steps:
            self.steps.append(step)

    def finished(self, job_id: str, now: float) -> None:
        self.finished_s[job_id] = now

    def jobs(self) -> list[JobLife]:
        """Returns the jobs in the order of their arrival; requests without a job are in none."""
        turns: dict[str, list[TurnLife]] = {}
        for turn in self.turns:
            if turn.job_id is not None:
                turns.setdefault(turn.job_id, []).append(turn)
        gaps = _by_job(self.gaps)
        pins = _by_job(self.pins)
        jobs = [
            job_life(job_id, of_job, gaps.get(job_id, ()), pins.get(job_id, ()), self.finished_s.get(job_id))
            for job_id, of_job in turns.items()
        ]
        return sorted(jobs, key=lambda job: job.began_s)


def _by_job(records: Iterable[OfJob]) -> dict[str, list[OfJob]]:
    by_job: dict[str, list[OfJob]] = {}
    for record in records:
        by_job.setdefault(record.job_id, []).append(record)
    return by_job


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Facts about a trace, known when all of it has been read."""

    header: TraceHeader
    report: TraceReport
    began_s: float
    ended_s: float
    """Latest time of any event."""
    num_lost: int
    """Events that the trace reports as missing."""

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s


def read_lives(path: str | Path, sink: LifeSink) -> TraceFacts:
    """Reads a trace into a sink. TraceError names an invalid line."""
    report = TraceReport()
    reader = LifeReader(sink)
    for event in read_named_trace(path, report):
        reader.take(event)
    reader.close()
    assert reader.header is not None, "a trace starts with one"
    return TraceFacts(reader.header, report, reader.began_s or 0.0, reader.now, reader.num_lost)
