"""Counts and sums over a whole trace. Summaries, pages and comparisons take their common numbers from here,
so that these agree."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

from engine.records.reported_stats import SpecDecodingStats
from eval.trace.analysis.jobs import GapLife, PinLife, PinOutcome, TurnEnd, TurnLife, job_of
from eval.trace.analysis.phases import Phase, Seconds, Span, job_seconds
from eval.trace.analysis.pool import StepLife
from eval.trace.analysis.pool_use import PoolUse

_PHASES = tuple(Phase)
_NUMBER = {phase: float(number) for number, phase in enumerate(_PHASES)}


@dataclass(slots=True)
class TraceTotals:
    """Sums the records of a ``LifeSink``; memory does not grow with the trace."""

    turns_by_end: Counter[TurnEnd] = field(default_factory=Counter)
    prompt_tokens: int = 0
    """Prompt tokens of turns that began to run."""
    cached_tokens: int = 0
    loaded_tokens: int = 0
    disk_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    num_preemptions: int = 0
    drafts: SpecDecodingStats = field(default_factory=SpecDecodingStats)
    turns_waited_s: float = 0.0
    """Waits of all turns, each by itself: for their place, for memory, and preempted."""
    longest_wait_s: float = 0.0
    """The longest wait of one turn."""
    pins: Counter[PinOutcome] = field(default_factory=Counter)
    held_block_s: float = 0.0
    vain_block_s: float = 0.0
    """Blocks x seconds pinned that no turn took over."""
    pool: PoolUse = field(default_factory=PoolUse)

    def turn(self, turn: TurnLife) -> None:
        self.turns_by_end[turn.end] += 1
        self.prompt_tokens += turn.num_prompt_tokens if turn.started_s is not None else 0
        self.cached_tokens += turn.cached_tokens
        self.loaded_tokens += turn.loaded_tokens
        self.disk_tokens += turn.disk_tokens
        self.recomputed_tokens += turn.recomputed_tokens
        self.output_tokens += turn.num_output_tokens
        self.num_preemptions += turn.num_preemptions
        self.drafts.add(turn.drafts)
        self.turns_waited_s += turn.seconds.waited_s
        self.longest_wait_s = max(self.longest_wait_s, turn.seconds.waited_s)

    def pin(self, pin: PinLife) -> None:
        self.pins[pin.outcome] += 1
        self.held_block_s += pin.block_s
        self.vain_block_s += pin.vain_block_s

    def step(self, step: StepLife) -> None:
        self.pool.add(step)

    def close(self) -> None:
        self.pool.close()

    @property
    def num_turns(self) -> int:
        return self.turns_by_end.total()


class JobTimes:
    """Each job's wall time by phase, in four numbers for each span of its turns and gaps."""

    def __init__(self) -> None:
        self._spans: dict[str, array[float]] = {}

    def turn(self, turn: TurnLife) -> None:
        for span in turn.spans:
            self._add(job_of(turn), span)

    def gap(self, gap: GapLife) -> None:
        if gap.span is not None:
            self._add(gap.job_id, gap.span)

    def _add(self, job_id: str, span: Span) -> None:
        told = self._spans.setdefault(job_id, array("d"))
        told.extend((_NUMBER[span.phase], span.start_s, span.end_s, span.memory_s))

    def total(self) -> Seconds:
        """Returns the sum over all jobs."""
        return sum((job_seconds(self._of(told)) for told in self._spans.values()), Seconds())

    @staticmethod
    def _of(told: array[float]) -> list[Span]:
        rows = (told[at : at + 4] for at in range(0, len(told), 4))
        return [Span(_PHASES[int(phase)], start, end, memory) for phase, start, end, memory in rows]
