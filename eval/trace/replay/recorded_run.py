"""The run of a trace: its jobs, to be run again, and its figures."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from eval.errors import TraceFileError
from eval.load.records import EngineCounters, JobRecord, TurnRecord, recomputed_tokens
from eval.trace.analysis.jobs import GapLife, PinLife, PinOutcome, TurnEnd, TurnLife
from eval.trace.analysis.life_reader import LifeReader
from eval.trace.analysis.pool import StepLife
from eval.trace.replay.block_names import BlockNames, Segment
from eval.trace.replay.errors import NotReplayableError
from eval.workloads.job import GapKind, Job, ToolRun, Turn
from tracing.events import (
    PinEvent,
    PrefixCacheEvent,
    ReportedToolCall,
    RequestArrived,
    SignalEvent,
    StepDecision,
    StepOutput,
    TraceEvent,
    TraceHeader,
)
from tracing.late_names import read_named_trace
from tracing.reader import TraceReport, in_order

SCOPE = "trace"
"""Scope of block ids, the same in all jobs, so that prompts which shared a prefix share it again."""

AS_RECORDED = (
    "jobs are as recorded: their tokens, the blocks that prompts share, when they came; ASSUMED: the time "
    "from the end of a turn to the arrival of the next is the same whatever the policy"
)

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The recorded run of a trace."""

    header: TraceHeader
    jobs: list[Job]
    job_records: list[JobRecord]
    turn_records: list[TurnRecord]
    counters: EngineCounters
    unnamed: frozenset[str]
    """Jobs that no client named: each was a single-turn request until it called a tool, or returned."""
    notes: list[str]


def read_run(path: Path) -> RecordedRun:
    """Reads a trace; TraceError if it is not one, TraceFileError if no turn in it ended."""
    report = TraceReport()
    reader = _RunReader()
    for event in in_order(path, read_named_trace(path, report)):
        reader.take(event)
    run = reader.run(path.stem)
    if not run.jobs:
        raise TraceFileError(f"{path}: no turn of this trace ended, so there is nothing to simulate.")
    if report.cut_line is not None:
        run.notes.append(f"the trace was CUT OFF in line {report.cut_line} and read up to there")
    return run


@dataclass(slots=True)
class _RunReader:
    """Takes every event of a trace in order; a sink for the records that are read from them."""

    lives: LifeReader = field(init=False)
    turns: list[TurnLife] = field(default_factory=list)
    names: BlockNames = field(default_factory=BlockNames)
    segments: dict[str, Segment] = field(default_factory=dict)
    """Segments of requests that may still grow."""
    blocks: dict[str, Runs] = field(default_factory=dict)
    """Blocks of prompts, by request."""
    numbers: dict[bytes, int] = field(default_factory=dict)
    calls: dict[str, list[ReportedToolCall]] = field(default_factory=dict)
    pins_ended: Counter[str] = field(default_factory=Counter)
    pin_block_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    num_loaded_tokens: int = 0
    """Tokens that were loaded instead of computed."""
    num_disk_tokens: int = 0
    """How many of these were read from disk."""
    arrived: dict[str, RequestArrived] = field(default_factory=dict)
    """Arrivals by request."""
    last_steps: set[str] = field(default_factory=set)
    """Requests whose clients declared them the last turn of their job."""
    finished_s: dict[str, float] = field(default_factory=dict)
    """When each job's client last reported it as finished."""
    num_client_signals: int = 0

    def __post_init__(self) -> None:
        self.lives = LifeReader(self)

    def take(self, event: TraceEvent) -> None:
        self.lives.take(event)
        match event:
            case RequestArrived():
                self._arrived(event)
            case StepOutput():
                for req_id, names in event.blocks.items():
                    if req_id in self.segments:
                        self.names.extend(self.segments[req_id], names)
            case SignalEvent(kind="tool_gap_started", req_id=str(req_id)):
                self.calls[req_id] = event.calls
            case SignalEvent(kind="job_finished", job_id=str(job_id)):
                self.finished_s[job_id] = event.now
            case SignalEvent(kind="tool_signal"):
                self.num_client_signals += 1
            case StepDecision():
                self.num_preemptions += len(event.preempted)
                known = (count - event.drafts.get(req_id, 0) for req_id, count in event.tokens.items())
                self.num_computed_tokens += sum(count for count in known if count > 1)
            case PrefixCacheEvent():
                self.num_loaded_tokens += event.loaded_tokens
                self.num_disk_tokens += event.disk_tokens
            case PinEvent(kind="ended", cause=str(cause)):
                self.pins_ended[cause] += 1
            case _:
                pass

    def _arrived(self, event: RequestArrived) -> None:
        self.arrived[event.req_id] = event
        if event.is_last_step:
            self.last_steps.add(event.req_id)
        try:
            segment, chain = self.names.open(event)
        except NotReplayableError:
            return  # its first blocks were named before the trace began
        self.segments[event.req_id] = segment
        numbers = [self.numbers.setdefault(name, len(self.numbers)) for name in chain]
        self.blocks[event.req_id] = _runs(numbers)

    # ---- lives ----

    def turn(self, turn: TurnLife) -> None:
        self.segments.pop(turn.req_id, None)
        self.turns.append(turn)

    def gap(self, gap: GapLife) -> None:
        pass

    def pin(self, pin: PinLife) -> None:
        for outcome, block_s in pin.block_s_by_outcome.items():
            if outcome not in (PinOutcome.REFUSED, PinOutcome.OPEN):
                self.pin_block_s[outcome.value] += block_s

    def step(self, step: StepLife) -> None:
        pass

    def finished(self, job_id: str, now: float) -> None:
        pass

    # ---- the run ----

    def run(self, source: str) -> RecordedRun:
        self.lives.close()
        header = self.lives.header
        assert header is not None, "the reader has checked it"
        ended = [turn for turn in self.turns if turn.end is TurnEnd.ENDED and turn.arrival_told]
        by_job = _by_job(ended)
        began_s = min((turns[0].arrived_s for turns in by_job.values()), default=0.0)
        jobs: list[Job] = []
        job_records: list[JobRecord] = []
        turn_records: list[TurnRecord] = []
        for job_id, turns in by_job.items():
            job = self._job(job_id, turns, source, began_s)
            jobs.append(job)
            job_records.append(_job_record(job, turns, began_s))
            turn_records += _turn_records(job, turns, began_s)
        return RecordedRun(
            header=header,
            jobs=jobs,
            job_records=job_records,
            turn_records=turn_records,
            counters=self._counters(header),
            unnamed=frozenset(
                job_id for job_id, turns in by_job.items() if not any(map(self._is_named, turns))
            ),
            notes=self._notes(by_job, len(ended)),
        )

    def _job(self, job_id: str, turns: list[TurnLife], source: str, began_s: float) -> Job:
        made: list[Turn] = []
        for index, turn in enumerate(turns):
            following = turns[index + 1] if index + 1 < len(turns) else None
            known = made[-1].input_tokens + made[-1].output_tokens if made else 0
            gap_s = None if following is None else max(0.0, following.arrived_s - turn.ended_s)
            made.append(
                Turn(
                    input_tokens=turn.num_prompt_tokens,
                    prefix_tokens=min(known, turn.num_known_tokens, turn.num_prompt_tokens),
                    output_tokens=max(1, turn.num_output_tokens),
                    gap_kind=self._gap_kind(turn, following),
                    gap_s=gap_s,
                    gap_measured=gap_s is not None,
                    calls=() if following is None else self._calls(turn),
                    block_runs=self.blocks.get(turn.req_id, ()),
                    told_last=turn.req_id in self.last_steps,
                    tells_calls=turn.req_id in self.calls or not self.calls,
                )
            )
        header = self.lives.header
        assert header is not None
        return Job(
            job_id=job_id,
            source=source,
            turns=tuple(made),
            arrival_s=turns[0].arrived_s - began_s,
            priority=self._priority(turns[0]),
            block_size=header.block_size,
            block_scope=SCOPE,
            tenant=self._tenant(turns[0]),
            is_known=any(turn.job_id is not None or not self._is_lone(turn) for turn in turns),
            finished_s=self._finished_s(job_id, turns[-1]),
        )

    def _is_named(self, turn: TurnLife) -> bool:
        """Whether a client named the job; True if the record of its arrival is missing."""
        arrived = self.arrived.get(turn.req_id)
        return arrived is None or arrived.job_id is not None

    def _is_lone(self, turn: TurnLife) -> bool:
        arrived = self.arrived.get(turn.req_id)
        return arrived is not None and not arrived.in_job

    def _tenant(self, turn: TurnLife) -> str | None:
        arrived = self.arrived.get(turn.req_id)
        return None if arrived is None else arrived.tenant

    def _priority(self, turn: TurnLife) -> int:
        arrived = self.arrived.get(turn.req_id)
        return 0 if arrived is None else arrived.priority

    def _finished_s(self, job_id: str, last: TurnLife) -> float | None:
        """Time from the last turn's end to the client's report; None if it reported before that end."""
        finished_s = self.finished_s.get(job_id)
        return finished_s - last.ended_s if finished_s is not None and finished_s >= last.ended_s else None

    def _gap_kind(self, turn: TurnLife, following: TurnLife | None) -> GapKind:
        if following is None:
            return GapKind.END
        return GapKind.TOOL if self.calls.get(turn.req_id) else GapKind.UNKNOWN

    def _calls(self, turn: TurnLife) -> tuple[ToolRun, ...]:
        """Returns the calls with their arguments as recorded, so that a policy classifies them as before."""
        return tuple(ToolRun(call.name, call.arguments) for call in self.calls.get(turn.req_id, ()))

    def _counters(self, header: TraceHeader) -> EngineCounters:
        return EngineCounters(
            block_size=header.block_size,
            num_blocks=header.num_blocks,
            num_preemptions=self.num_preemptions,
            computed_prefill_tokens=self.num_computed_tokens,
            pins_ended=dict(sorted(self.pins_ended.items())),
            pin_block_s=dict(sorted(self.pin_block_s.items())),
            host_tokens_loaded=self.num_loaded_tokens if header.num_host_blocks else None,
            disk_tokens_loaded=self.num_disk_tokens if header.num_disk_blocks else None,
        )

    def _notes(self, by_job: dict[str, list[TurnLife]], num_ended: int) -> list[str]:
        notes = [AS_RECORDED]
        if self.num_client_signals:
            times = f"{self.num_client_signals:,} times"
            notes.append(f"what clients said of their running calls ({times}) is not simulated")
        if len(self.turns) > num_ended:
            num_left_out = len(self.turns) - num_ended
            notes.append(f"{num_left_out} turns were left out: they were not answered to the end")
        num_overlaps = sum(b.arrived_s < a.ended_s for turns in by_job.values() for a, b in pairwise(turns))
        if num_overlaps:
            notes.append(
                f"{num_overlaps} turns began while one of their job still ran; in simulation they follow it"
            )
        return notes


def _by_job(turns: list[TurnLife]) -> dict[str, list[TurnLife]]:
    """Groups turns by job in order of first arrivals; a request without a job forms its own."""

    def name(turn: TurnLife) -> str:
        return turn.job_id if turn.job_id is not None else f"request {turn.req_id}"

    by_job: dict[str, list[TurnLife]] = {}
    for turn in sorted(turns, key=lambda turn: turn.arrived_s):
        by_job.setdefault(name(turn), []).append(turn)
    return by_job


def _runs(numbers: list[int]) -> Runs:
    """Encodes consecutive ids as (first, count) runs."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return tuple(runs)


def _job_record(job: Job, turns: list[TurnLife], began_s: float) -> JobRecord:
    return JobRecord(
        job_id=job.job_id,
        source=job.source,
        start_s=turns[0].arrived_s - began_s,
        end_s=max(turn.ended_s for turn in turns) - began_s,
        num_turns=len(turns),
        num_planned_turns=len(turns),
        num_recorded_turns=len(turns),
    )


def _turn_records(job: Job, turns: list[TurnLife], began_s: float) -> list[TurnRecord]:
    records: list[TurnRecord] = []
    for number, (turn, told) in enumerate(zip(turns, job.turns, strict=True), start=1):
        shared = recomputed_tokens(records[-1] if records else None, told.input_tokens, 0)
        records.append(
            TurnRecord(
                job_id=job.job_id,
                turn=number,
                start_s=turn.arrived_s - began_s,
                latency_s=turn.ended_s - turn.arrived_s,
                ttft_s=turn.ttft_s,
                prompt_tokens=turn.num_prompt_tokens,
                cached_tokens=turn.cached_tokens,
                # As the simulator counts them.
                recomputed_tokens=max(0, min(told.prefix_tokens, shared) - turn.cached_tokens),
                output_tokens=turn.num_output_tokens,
                queued_s=None if turn.started_s is None else turn.started_s - turn.arrived_s,
                as_recorded=True,
                tool=told.tool,
                gap_s=told.gap_s,
            )
        )
    return records
