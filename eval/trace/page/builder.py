"""Reads a trace into a page's data, in one pass, or in two for a long trace."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from eval.trace.analysis.jobs import GapLife, JobLife, PinLife, TurnLife
from eval.trace.analysis.lives import TraceFacts as Facts
from eval.trace.analysis.lives import read_lives
from eval.trace.analysis.phases import Phase, Span
from eval.trace.analysis.pool import StepLife
from eval.trace.page.job_book import MAX_TURNS_OF_JOB, JobBook, Sketch, choose_jobs
from eval.trace.page.page_data import (
    DecisionRow,
    GapRow,
    JobData,
    Number,
    PageData,
    PinRow,
    TraceFacts,
    TurnRow,
)
from eval.trace.page.series import OutOfOrderError, PoolSeries
from eval.trace.page.strings import Strings
from eval.trace.page.tool_gaps import ToolGaps, call_name
from eval.trace.page.totals import KINDS, Totals, by_kind
from tracing.reader import TraceError

PHASES = tuple(Phase)
CALENDAR_BEGINS_S = 1e9
"""A wall time before this (2001) is a simulation's."""


class _Everything:
    """The first pass: a ``LifeSink`` that keeps sums over all and details of what may be shown."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.series = PoolSeries()
        self.tools = ToolGaps()
        self.book = JobBook()

    def turn(self, turn: TurnLife) -> None:
        self.totals.turn(turn)
        self.book.turn(turn)

    def gap(self, gap: GapLife) -> None:
        self.totals.gap(gap)
        self.tools.gap(gap)
        self.book.gap(gap)

    def pin(self, pin: PinLife) -> None:
        self.totals.pin(pin)
        self.tools.pin(pin)
        self.book.pin(pin)

    def step(self, step: StepLife) -> None:
        self.series.add(step)
        self.totals.step(step)

    def finished(self, job_id: str, now: float) -> None:
        self.book.finished(job_id, now)

    def close(self) -> None:
        self.tools.close()
        self.totals.close()
        self.series.close()


class _Chosen(JobBook):
    """The second pass: details of some jobs."""

    def step(self, step: StepLife) -> None:
        pass


def read_page(path: Path) -> PageData:
    """Returns all data of a page. TraceError if the file is not a trace, OSError if it cannot be read."""
    everything = _Everything()
    try:
        facts = read_lives(path, everything)
    except OutOfOrderError as error:
        raise TraceError(f"{path}: {error}") from error
    everything.close()
    book = everything.book
    if facts.report.end is None:
        book.cut_off()
    if book.too_many:
        book = _Chosen(choose_jobs(book.sketches))
        read_lives(path, book)
    jobs = book.jobs()
    return _PageBuilder(facts, everything).page(path.name, jobs)


class _PageBuilder:
    """Makes rows of records: times since the beginning of the trace, texts as numbers."""

    def __init__(self, facts: Facts, everything: _Everything) -> None:
        self._facts = facts
        self._everything = everything
        self._sketches = everything.book.sketches
        arrivals_s = (sketch.began_s for sketch in self._sketches.values())
        self._origin_s = min(facts.began_s, *arrivals_s, facts.ended_s)
        self._strings = Strings()
        self._input_names: dict[tuple[str, ...], int] = {}

    def page(self, name: str, jobs: list[JobLife]) -> PageData:
        everything = self._everything
        duration_s = self._facts.ended_s - self._origin_s
        seconds = everything.totals.jobs.total()
        return PageData(
            trace=self._trace(name, duration_s),
            figures=everything.totals.figures(self._sketches, duration_s, seconds),
            warnings=self._wrong_with_trace(),
            notes=self._left_out(jobs),
            phases=[phase.value for phase in PHASES],
            kinds=list(KINDS),
            seconds=by_kind(seconds),
            series=everything.series.series(self._origin_s),
            jobs=[self._job(job, self._sketches[job.job_id]) for job in jobs],
            tools=everything.tools.tools(self._strings),
            strings=self._strings.texts,
            input_names=[list(names) for names in self._input_names],
        )

    def _trace(self, name: str, duration_s: float) -> TraceFacts:
        header = self._facts.header
        began = None
        if header.wall_time_s > CALENDAR_BEGINS_S:
            began_s = header.wall_time_s + self._origin_s - header.monotonic_s
            began = f"{datetime.fromtimestamp(began_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
        return TraceFacts(
            name=name,
            policy=header.policy,
            program=header.program,
            began=began,
            duration_s=round(duration_s, 4),
            block_size=header.block_size,
            num_blocks=header.num_blocks,
            num_host_blocks=header.num_host_blocks,
            max_num_seqs=header.max_num_seqs,
            max_num_batched_tokens=header.max_num_batched_tokens,
        )

    # ---- warnings first ----

    def _wrong_with_trace(self) -> list[str]:
        facts = self._facts
        notes: list[str] = []
        if facts.report.end is None:
            notes.append(
                "The trace was cut off: it was not closed in order, so its last moments are missing."
            )
        elif facts.report.end.dropped:
            notes.append(f"{facts.report.end.dropped:,} events were dropped while the trace was written.")
        if facts.num_lost:
            notes.append(
                f"{facts.num_lost:,} events are missing in the middle; turns around them are guessed."
            )
        if facts.report.num_events_before:
            notes.append("Earlier parts of the trace are missing: it begins in the middle of the run.")
        if not self._everything.series.tells_cached:
            notes.append(
                "The trace does not say which free blocks hold a cached prefix: all count as cached."
            )
        return notes

    def _left_out(self, jobs: list[JobLife]) -> list[str]:
        tools = self._everything.tools
        totals = self._everything.totals
        notes: list[str] = []
        num_jobs = len(self._sketches)
        if len(jobs) < num_jobs:
            notes.append(
                f"{len(jobs):,} of {num_jobs:,} jobs are drawn: those that took longest, and of the others "
                "an even sample over time. The figures, the pool and the calls are of all jobs."
            )
        num_long = sum(sketch.num_turns > MAX_TURNS_OF_JOB for sketch in self._sketches.values())
        if num_long:
            notes.append(
                f"{num_long:,} jobs have more than {MAX_TURNS_OF_JOB:,} turns; the later ones are left out."
            )
        if tools.num_points_left_out:
            notes.append(f"{tools.num_points_left_out:,} gaps are not drawn: the points are a sample.")
        if tools.num_left_out:
            notes.append(
                f"{tools.num_left_out:,} kinds of calls, those with the fewest gaps, are not listed."
            )
        if not totals.trace.num_turns:
            notes.append("No request is in the trace.")
        return notes

    # ---- rows ----

    def _at(self, time_s: float) -> float:
        return round(time_s - self._origin_s, 4)

    def _job(self, job: JobLife, sketch: Sketch) -> JobData:
        return JobData(
            job_id=job.job_id,
            began_s=self._at(sketch.began_s),
            ended_s=self._at(sketch.ended_s),
            is_open=sketch.is_open,
            num_turns=sketch.num_turns,
            seconds=by_kind(job.seconds),
            turns=[self._turn(turn) for turn in job.turns],
            gaps=[self._gap(gap) for gap in job.gaps],
            pins=[self._pin(pin) for pin in job.pins],
            tiles=_flat(job.spans) if job.overlaps else None,
        )

    def _turn(self, turn: TurnLife) -> TurnRow:
        return TurnRow(
            turn.req_id,
            turn.number,
            self._at(turn.arrived_s),
            turn.end.value,
            turn.num_prompt_tokens,
            turn.num_output_tokens,
            turn.num_known_tokens,
            turn.cached_tokens,
            turn.loaded_tokens,
            turn.recomputed_tokens,
            turn.num_preemptions,
            _flat(turn.spans),
        )

    def _gap(self, gap: GapLife) -> GapRow:
        return GapRow(
            gap.req_id,
            self._at(gap.started_s),
            None if gap.ended_s is None else self._at(gap.ended_s),
            self._strings.number(call_name(gap.tools)) if gap.tools else None,
            [(self._at(told.now), told.state, told.remaining_s) for told in gap.told],
        )

    def _pin(self, pin: PinLife) -> PinRow:
        inputs = pin.decisions[-1].inputs if pin.decisions else {}
        return PinRow(
            pin.req_id,
            self._at(pin.began_s),
            self._at(pin.ended_s),
            pin.outcome.value,
            pin.num_blocks,
            pin.blocks_at_end,
            None if pin.deadline_s is None else self._at(pin.deadline_s),
            len(pin.shrinks),
            pin.revoked_by,
            None if pin.spared_s is None else round(pin.spared_s, 4),
            [self._decision(one.now, one.ttl_s, one.rule, one.reason) for one in pin.decisions],
            self._input_names.setdefault(tuple(inputs), len(self._input_names)),
            [_short(value) for value in inputs.values()],
        )

    def _decision(self, now: float, ttl_s: float, rule: str, reason: str) -> DecisionRow:
        return DecisionRow(
            self._at(now), round(ttl_s, 4), self._strings.number(rule), self._strings.number(reason)
        )


def _flat(spans: list[Span] | tuple[Span, ...]) -> list[float]:
    """Returns three numbers for each span."""
    numbers: list[float] = []
    for span in spans:
        numbers += (PHASES.index(span.phase), round(span.duration_s, 4), round(span.memory_s, 4))
    return numbers


def _short(value: Number) -> Number:
    """Rounds to four significant digits."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
