"""The records read from a trace: turns, the gaps between them, pins, and the jobs that they form.

Times are those of the engine's clock, in seconds. Does not know how the records were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from engine.records.reported_stats import SpecDecodingStats
from eval.trace.analysis.phases import Phase, Seconds, Span, seconds_of, tile


class TurnEnd(Enum):
    """How a turn ended."""

    ENDED = "ended"
    ABORTED = "aborted"
    OPEN = "open"
    """It was still open when the trace ended."""
    LOST = "lost"
    """Its end is among events that could not be written."""


class PinOutcome(Enum):
    """The end of a tip that was pinned, or of the attempt to pin it."""

    HANDED_OVER = "handed_over"
    EXPIRED = "expired"
    REVOKED = "revoked"
    RELEASED = "released"
    SUPERSEDED = "superseded"
    """Its job went on without it."""
    REFUSED = "refused"
    """It was not pinned: the pins had no free blocks for it, or its copy is as good."""
    OPEN = "open"
    """It was still pinned when the trace ended."""


@dataclass(frozen=True, slots=True)
class Parked:
    """Why a job could not begin at first: the blocks that jobs which had begun were likely to need."""

    needed_blocks: int
    allowed_blocks: int
    """The most blocks that these jobs and it may need."""
    own_blocks: int = 0
    """What the job itself was likely to need; 0 in older traces."""
    ahead_s: float = 0.0
    """How much later that was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLife:
    """One request, from its arrival to its end."""

    job_id: str | None
    """Id of the job; None: a request without a job."""
    req_id: str
    number: int
    """1 for the job's first turn; a retry has the number of the turn that it repeats."""
    arrived_s: float
    arrival_told: bool
    """False: the trace does not record the arrival; ``arrived_s`` is when the turn is first seen."""
    started_s: float | None
    """When it first joined the batch; None: never."""
    first_token_s: float | None
    ended_s: float
    """Time of the end; for an open turn, the end of the trace."""
    end: TurnEnd
    num_prompt_tokens: int
    num_output_tokens: int
    num_known_tokens: int
    """Prompt tokens that the turn before it had computed."""
    cached_tokens: int
    """Prompt tokens found when it was first admitted, in the pool or on the host tier."""
    loaded_tokens: int
    """Cached tokens that came from host memory or disk."""
    disk_tokens: int
    """Loaded tokens that were read from disk."""
    recomputed_tokens: int
    """Tokens recomputed although the job had computed them before."""
    num_preemptions: int
    drafts: SpecDecodingStats
    """Counts of its drafts."""
    gap_s: float | None
    """Time since the end of the turn that it continues; None: it continues none."""
    predicted_excess_s: float | None
    """Predicted seconds of service beyond a usual job's, by which it is ranked; None: ranked by age."""
    diverged_at_token: int | None
    spans: tuple[Span, ...]
    """Its phases, without a gap from arrival to end."""
    seconds: Seconds
    """Seconds of the spans, added up."""
    parked: Parked | None
    """Why its job could not begin; None: it could."""
    mean_waiting: float | None
    """Mean number of requests in the queue while it waited, with itself; None: no step began meanwhile."""
    mean_pinned_blocks: float | None
    """Mean number of blocks that pins held while it waited."""

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.arrived_s

    @property
    def num_output_steps(self) -> int:
        """Number of steps that its output tokens came from."""
        return self.num_output_tokens - self.drafts.num_accepted_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to first token, as the engine sees them."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s


def job_of(turn: TurnLife) -> str:
    """Returns the job id; a request without a job forms its own."""
    return turn.req_id if turn.job_id is None else turn.job_id


@dataclass(frozen=True, slots=True)
class ClientHint:
    """A client's signal about its running calls."""

    now: float
    state: str
    """One of: started | progress | finished | cancelled."""
    remaining_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GapLife:
    """The time from a turn's end to the arrival of the turn that continues it."""

    job_id: str
    req_id: str
    """Request id of the turn that ended."""
    number: int
    started_s: float
    ended_s: float | None
    """When it ended; None: no turn continued before the end of the trace."""
    next_req_id: str | None
    tools: tuple[str, ...] | None
    """Keys of the tools that were called; empty if none were, None if that was not reported."""
    told: tuple[ClientHint, ...] = ()

    @property
    def duration_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.started_s

    @property
    def awaits_turn(self) -> bool:
        """Whether tools were called and their results were missing when the trace ended."""
        return self.ended_s is None and bool(self.tools)

    @property
    def num_told(self) -> int:
        return len(self.told)

    @property
    def called(self) -> str | None:
        """Returns the keys in one text, which names the kind of gap; empty if nothing was called."""
        return None if self.tools is None else " ".join(self.tools)

    @property
    def span(self) -> Span | None:
        """Returns None for an open gap."""
        if self.ended_s is None:
            return None
        return Span(Phase.TOOL if self.tools else Phase.CLIENT, self.started_s, self.ended_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinDecision:
    """One decision of a rule about a tip."""

    now: float
    ttl_s: float
    """Time to pin, from the end of the turn; 0: the KV is not retained."""
    rule: str
    reason: str
    inputs: dict[str, float | int | str | bool | None]


@dataclass(frozen=True, slots=True)
class Shrink:
    """A part of a pin that was revoked."""

    now: float
    num_blocks: int
    by: str | None
    """The request that it was revoked for; None if unknown."""
    outcome: PinOutcome = PinOutcome.REVOKED
    """How the part ended: revoked, or superseded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinLife:
    """A tip that was pinned after its turn, or was refused."""

    pin_id: int | None
    """Id of the pin; None: it was refused."""
    job_id: str
    req_id: str
    """Request id of the turn that left it."""
    began_s: float
    num_blocks: int
    """Blocks of the pin at first."""
    deadline_s: float | None
    """The last deadline of the pin."""
    decisions: tuple[PinDecision, ...]
    shrinks: tuple[Shrink, ...]
    ended_s: float
    """Time of the end; for an open pin, the end of the trace."""
    outcome: PinOutcome
    revoked_by: str | None
    """The request that it was revoked for; None if unknown."""
    refused_for: str | None = None
    """Why it was refused, if it was."""
    block_s: float
    """Sum of blocks times seconds that it held."""
    blocks_at_end: int
    needed_blocks: int | None = None
    """Number of its blocks that would have been evicted without it; None if the trace does not record it."""

    @property
    def held_s(self) -> float:
        return self.ended_s - self.began_s

    @property
    def block_s_by_outcome(self) -> dict[PinOutcome, float]:
        """Returns ``block_s`` by the blocks' outcome, like the server's metrics: parts of a pin that was
        handed over may have been revoked earlier."""
        held = {self.outcome: self.blocks_at_end * self.held_s}
        for part in self.shrinks:
            lasted_s = max(0.0, part.now - self.began_s)
            held[part.outcome] = held.get(part.outcome, 0.0) + part.num_blocks * lasted_s
        return held

    @property
    def vain_block_s(self) -> float:
        """Block-seconds that no turn took over; a pin that is still open does not count."""
        of_use = (PinOutcome.HANDED_OVER, PinOutcome.OPEN)
        return sum(held for outcome, held in self.block_s_by_outcome.items() if outcome not in of_use)

    @property
    def last_decision(self) -> PinDecision | None:
        """Returns None if it was pinned for the grace period only."""
        return self.decisions[-1] if self.decisions else None

    @property
    def rule(self) -> str | None:
        return self.last_decision.rule if self.last_decision is not None else None

    @property
    def reason(self) -> str | None:
        return self.last_decision.reason if self.last_decision is not None else None

    @property
    def granted_s(self) -> float:
        """Time that the last decision granted, counted from the turn's end."""
        return self.last_decision.ttl_s if self.last_decision is not None else 0.0

    @property
    def reload_s(self) -> float | None:
        """The policy's estimate of loading all of it back; None if nothing is offloaded."""
        return self._input("reload_s")

    @property
    def again_s(self) -> float | None:
        """The policy's estimate of getting all of it back, by loading it if there are copies, else by
        computing it; None if the policy made none."""
        return self._input("prefill_s") if self.reload_s is None else self.reload_s

    @property
    def expected_s(self) -> float | None:
        """Median of the time to the return, as the last decision saw it."""
        return self._input("tool_median_s")

    def _input(self, name: str) -> float | None:
        value = self.last_decision.inputs.get(name) if self.last_decision is not None else None
        return float(value) if isinstance(value, int | float) else None

    @property
    def num_decisions(self) -> int:
        return len(self.decisions)

    @property
    def num_shrinks(self) -> int:
        return len(self.shrinks)

    @property
    def spared_s(self) -> float | None:
        """Seconds that it saved the turn that took it over, for blocks that would have been evicted. 0 if no
        turn took over or no block would have been evicted; None if the trace does not record it."""
        if self.outcome is not PinOutcome.HANDED_OVER or not self.num_blocks or self.needed_blocks == 0:
            return 0.0
        if self.needed_blocks is None or self.again_s is None:
            return None
        return self.again_s * min(self.needed_blocks, self.blocks_at_end) / self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLife:
    """A job: all its turns in the order of their arrival, the gaps between them, and its pins."""

    job_id: str
    turns: tuple[TurnLife, ...]
    gaps: tuple[GapLife, ...]
    pins: tuple[PinLife, ...]
    finished_s: float | None
    """When the client reported, or the policy assumed, that it was over."""
    trace_was_cut: bool = False
    """Whether the trace has no end, so that turns of the job may be missing."""

    @property
    def began_s(self) -> float:
        return self.turns[0].arrived_s

    @property
    def ended_s(self) -> float:
        return max(turn.ended_s for turn in self.turns)

    @property
    def wall_s(self) -> float:
        """From the first turn's arrival to the end of the last: the job's completion time."""
        return self.ended_s - self.began_s

    @property
    def is_open(self) -> bool:
        """Whether a turn was open when the trace ended, or calls were when it was cut off."""
        return any(turn.end is TurnEnd.OPEN for turn in self.turns) or self.is_cut_in_calls

    @property
    def is_cut_in_calls(self) -> bool:
        """Whether the trace was cut off before it shows if a turn followed the job's last calls."""
        if not self.trace_was_cut or self.finished_s is not None or not self.gaps:
            return False
        last = self.gaps[-1]
        return last.started_s >= self.ended_s and last.awaits_turn

    @property
    def overlaps(self) -> bool:
        """Whether some of its turns ran concurrently."""
        latest_s = self.turns[0].ended_s
        for turn in self.turns[1:]:
            if turn.arrived_s < latest_s:
                return True
            latest_s = max(latest_s, turn.ended_s)
        return False

    @property
    def spans(self) -> list[Span]:
        """Returns one phase for each moment of its wall time."""
        spans = [span for turn in self.turns for span in turn.spans]
        spans += [gap.span for gap in self.gaps if gap.span is not None]
        return tile(spans, self.began_s, self.ended_s)

    @property
    def seconds(self) -> Seconds:
        """Returns its wall time by phase; the seconds add up to it."""
        return seconds_of(self.spans)

    @property
    def recomputed_tokens(self) -> int:
        return sum(turn.recomputed_tokens for turn in self.turns)


def job_life(
    job_id: str,
    turns: Sequence[TurnLife],
    gaps: Sequence[GapLife],
    pins: Sequence[PinLife],
    finished_s: float | None = None,
) -> JobLife:
    """Makes a job from its records, at least one turn, in any order."""
    return JobLife(
        job_id=job_id,
        turns=tuple(sorted(turns, key=lambda turn: turn.arrived_s)),
        gaps=tuple(sorted(gaps, key=lambda gap: gap.started_s)),
        pins=tuple(sorted(pins, key=lambda pin: pin.began_s)),
        finished_s=finished_s,
    )
