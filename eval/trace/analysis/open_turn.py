"""A turn while its trace is being read: its present phase, and its phases so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.records.reported_stats import SpecDecodingStats
from eval.trace.analysis.jobs import Parked, TurnEnd, TurnLife
from eval.trace.analysis.phases import Phase, Span, seconds_of
from eval.trace.draft_outcomes import DraftOutcome


@dataclass(slots=True)
class WaitClock:
    """Running sums over time; a turn's wait is the difference of two states."""

    now: float = 0.0
    memory_s: float = 0.0
    """Seconds in which the engine had free budget and slots, but no memory."""
    waiting: float = 0.0
    """Queue length times seconds."""
    pinned: float = 0.0
    """Pinned blocks times seconds."""

    def copy(self) -> WaitClock:
        return WaitClock(self.now, self.memory_s, self.waiting, self.pinned)

    def advance(self, now: float, *, short_of_memory: bool, num_waiting: int, pinned_blocks: int) -> None:
        """Adds the time since the last call, during which this state held."""
        elapsed_s = max(0.0, now - self.now)
        self.now = now
        self.memory_s += elapsed_s * short_of_memory
        self.waiting += elapsed_s * num_waiting
        self.pinned += elapsed_s * pinned_blocks


@dataclass(slots=True, eq=False)
class OpenTurn:
    """A turn before its end; ``close`` makes its record."""

    job_id: str | None
    req_id: str
    number: int
    arrived_s: float
    since_s: float
    """When the present phase began."""
    arrival_told: bool = True
    phase: Phase = Phase.WAIT
    spans: list[Span] = field(default_factory=list)
    started_s: float | None = None
    first_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int | None = None
    """Output tokens as reported; None: to be counted."""
    num_known_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    disk_tokens: int = 0
    recomputed_tokens: int | None = None
    num_preemptions: int = 0
    gap_s: float | None = None
    predicted_excess_s: float | None = None
    diverged_at_token: int | None = None
    parked: Parked | None = None
    num_computed: int = 0
    num_to_compute: int = 0
    """Tokens to compute before the next one can be sampled."""
    drafts: SpecDecodingStats = field(default_factory=SpecDecodingStats)
    began_to_wait: WaitClock | None = None
    """Clock state at the first step after its arrival; None before that."""
    waited: WaitClock | None = None
    """Clock state when it was admitted."""

    def enter(self, phase: Phase, now: float, clock: WaitClock) -> None:
        """Ends the present phase and begins another."""
        if phase is self.phase:
            return
        memory_s = 0.0
        if self.phase is Phase.WAIT:
            self.waited = clock.copy()
            if self.began_to_wait is not None:
                memory_s = min(now - self.since_s, clock.memory_s - self.began_to_wait.memory_s)
        if now > self.since_s:
            self.spans.append(Span(self.phase, self.since_s, now, memory_s))
            self.since_s = now
        self.phase = phase

    def give_back(self) -> None:
        """Handles a preemption: none of its tokens are computed any more."""
        self.num_preemptions += 1
        self.num_computed = 0

    def verified(self, drafted: DraftOutcome) -> None:
        """Records a step's drafts: the accepted ones are computed."""
        self.num_computed += drafted.num_accepted
        self.drafts.observe(drafted.num_drafts, drafted.num_accepted)

    @property
    def running(self) -> bool:
        return self.phase in (Phase.PREFILL, Phase.DECODE, Phase.RECOMPUTE)

    def close(self, end: TurnEnd, now: float, clock: WaitClock) -> TurnLife:
        """Ends the last phase and returns the record."""
        self.enter(Phase.CLIENT, now, clock)
        waiting, pinned = self._means()
        num_output_tokens = self.num_output_tokens
        if num_output_tokens is None:
            got_any = self.first_token_s is not None
            num_output_tokens = max(0, self.num_computed + 1 - self.num_prompt_tokens) if got_any else 0
        return TurnLife(
            job_id=self.job_id,
            req_id=self.req_id,
            number=self.number,
            arrived_s=self.arrived_s,
            arrival_told=self.arrival_told,
            started_s=self.started_s,
            first_token_s=self.first_token_s,
            ended_s=self.spans[-1].end_s if self.spans else self.arrived_s,
            end=end,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            num_known_tokens=self.num_known_tokens,
            cached_tokens=self.cached_tokens,
            loaded_tokens=self.loaded_tokens,
            disk_tokens=self.disk_tokens,
            recomputed_tokens=self._recomputed(),
            num_preemptions=self.num_preemptions,
            drafts=self.drafts,
            gap_s=self.gap_s,
            predicted_excess_s=self.predicted_excess_s,
            diverged_at_token=self.diverged_at_token,
            parked=self.parked,
            spans=tuple(self.spans),
            seconds=seconds_of(self.spans),
            mean_waiting=waiting,
            mean_pinned_blocks=pinned,
        )

    def _recomputed(self) -> int:
        if self.recomputed_tokens is not None:
            return self.recomputed_tokens
        return max(0, self.num_known_tokens - self.cached_tokens) if self.started_s is not None else 0

    def _means(self) -> tuple[float | None, float | None]:
        began = self.began_to_wait
        ended = self.waited
        if began is None or ended is None or ended.now <= began.now:
            return None, None
        elapsed_s = ended.now - began.now
        return (ended.waiting - began.waiting) / elapsed_s, (ended.pinned - began.pinned) / elapsed_s
