"""The records of what a trace tells: turns, the gaps between them, pins, and the jobs they make up.

Times are those of the engine's clock, in seconds. Knows nothing of how they were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from engine.reported_stats import SpecDecodingStats
from eval.trace.analysis.phases import Phase, Seconds, Span, seconds_of, tile


class TurnEnd(Enum):
    """How a turn ended."""

    ENDED = "ended"
    ABORTED = "aborted"
    OPEN = "open"
    """It was still under way where the trace ends."""
    LOST = "lost"
    """Its end is among events that could not be written."""


class PinOutcome(Enum):
    """What became of a tip that was to be held."""

    HANDED_OVER = "handed_over"
    EXPIRED = "expired"
    REVOKED = "revoked"
    RELEASED = "released"
    SUPERSEDED = "superseded"
    """Its job went on without it."""
    REFUSED = "refused"
    """It was not held at all: there was no room for it among the pins, or its copy does as well."""
    OPEN = "open"
    """It was still held where the trace ends."""


@dataclass(frozen=True, slots=True)
class Parked:
    """Why a job might not begin when it was looked at first: what those begun were likely to need."""

    needed_blocks: int
    allowed_blocks: int
    """Blocks that they and it may need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLife:
    """One request, from its arrival to its end."""

    job_id: str | None
    """Id of the job; None: a request of no job."""
    req_id: str
    number: int
    """1 for the job's first turn; a retry has the number of what it repeats."""
    arrived_s: float
    arrival_told: bool
    """False: the trace does not say when; it is the first moment at which the turn is seen."""
    started_s: float | None
    """When it first joined the batch; None: it never did."""
    first_token_s: float | None
    ended_s: float
    """Time of the end; of one that is open, where the trace ends."""
    end: TurnEnd
    num_prompt_tokens: int
    num_output_tokens: int
    num_known_tokens: int
    """Prompt tokens that the turn it continues had computed."""
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
    """What became of its drafts."""
    gap_s: float | None
    """Time since the end of the turn it continues; None: it continues none."""
    predicted_excess_s: float | None
    """Seconds of service beyond a usual job's, by which its place was told; None: by age alone."""
    diverged_at_token: int | None
    spans: tuple[Span, ...]
    """What it did, without a hole from its arrival to its end."""
    seconds: Seconds
    """Seconds of the spans, added up."""
    parked: Parked | None
    """Reason why its job was kept from beginning; None: it never was."""
    mean_waiting: float | None
    """Requests in the queue while it waited, itself included; None: no step began meanwhile."""
    mean_pinned_blocks: float | None
    """Blocks that pins held while it waited."""

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.arrived_s

    @property
    def num_output_steps(self) -> int:
        """Steps that its output tokens came from."""
        return self.num_output_tokens - self.drafts.num_accepted_tokens

    @property
    def ttft_s(self) -> float | None:
        """From arrival to first token, as the engine sees them."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s


def job_of(turn: TurnLife) -> str:
    """A request of no job is one by itself."""
    return turn.req_id if turn.job_id is None else turn.job_id


@dataclass(frozen=True, slots=True)
class ClientHint:
    """What a client said of its running calls."""

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
    """Time at which it ended; None: nothing has continued it before the trace ends."""
    next_req_id: str | None
    tools: tuple[str, ...] | None
    """Keys of the tools that were called; empty if none were, None if that was not reported."""
    told: tuple[ClientHint, ...] = ()

    @property
    def duration_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.started_s

    @property
    def awaits_turn(self) -> bool:
        """Tools were called, and their results had not come back when the trace ended."""
        return self.ended_s is None and bool(self.tools)

    @property
    def num_told(self) -> int:
        return len(self.told)

    @property
    def called(self) -> str | None:
        """The keys in one text, which names the kind of gap; empty if nothing was called."""
        return None if self.tools is None else " ".join(self.tools)

    @property
    def span(self) -> Span | None:
        """None of one that is open."""
        if self.ended_s is None:
            return None
        return Span(Phase.TOOL if self.tools else Phase.CLIENT, self.started_s, self.ended_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinDecision:
    """One answer of a rule about a tip."""

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
    """Request for which; None where that is not known."""
    outcome: PinOutcome = PinOutcome.REVOKED
    """What became of the part: revoked, or superseded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinLife:
    """A tip that was held after its turn, or was refused."""

    pin_id: int | None
    """Id of the pin; None: it was refused."""
    job_id: str
    req_id: str
    """Request id of the turn that left it."""
    began_s: float
    num_blocks: int
    """Blocks of the pin at first."""
    deadline_s: float | None
    """The last one it was given."""
    decisions: tuple[PinDecision, ...]
    shrinks: tuple[Shrink, ...]
    ended_s: float
    """Time of the end; of one that is open, where the trace ends."""
    outcome: PinOutcome
    revoked_by: str | None
    """Request for which it was revoked; None where that is not known."""
    refused_for: str | None = None
    """Why it was refused, if it was."""
    block_s: float
    """Blocks times seconds that it held."""
    blocks_at_end: int
    needed_blocks: int | None = None
    """How many of its blocks would have been evicted without it; None where the trace does not tell."""

    @property
    def held_s(self) -> float:
        return self.ended_s - self.began_s

    @property
    def block_s_by_outcome(self) -> dict[PinOutcome, float]:
        """``block_s`` by what became of the blocks, as the server's metrics count them: parts may have been
        revoked from a pin that was handed over."""
        held = {self.outcome: self.blocks_at_end * self.held_s}
        for part in self.shrinks:
            lasted_s = max(0.0, part.now - self.began_s)
            held[part.outcome] = held.get(part.outcome, 0.0) + part.num_blocks * lasted_s
        return held

    @property
    def vain_block_s(self) -> float:
        """Of all that it held: what no turn took over; what is held still may be."""
        of_use = (PinOutcome.HANDED_OVER, PinOutcome.OPEN)
        return sum(held for outcome, held in self.block_s_by_outcome.items() if outcome not in of_use)

    @property
    def last_decision(self) -> PinDecision | None:
        """None: it was held for a grace only."""
        return self.decisions[-1] if self.decisions else None

    @property
    def rule(self) -> str | None:
        return self.last_decision.rule if self.last_decision is not None else None

    @property
    def reason(self) -> str | None:
        return self.last_decision.reason if self.last_decision is not None else None

    @property
    def granted_s(self) -> float:
        """For how long the last decision would hold it, counted from the turn's end."""
        return self.last_decision.ttl_s if self.last_decision is not None else 0.0

    @property
    def reload_s(self) -> float | None:
        """What the policy thought it would cost to load all of it again; None where nothing is offloaded."""
        return self._input("reload_s")

    @property
    def again_s(self) -> float | None:
        """What the policy thought it would cost to have all of it again, by loading it where there are
        copies, else by computing it; None if it did not ask itself."""
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
        """Seconds that the turn which took it over was spared by it: of the blocks that would have been
        evicted without it. 0 if none did, or none would; None where the trace does not tell."""
        if self.outcome is not PinOutcome.HANDED_OVER or not self.num_blocks or self.needed_blocks == 0:
            return 0.0
        if self.needed_blocks is None or self.again_s is None:
            return None
        return self.again_s * min(self.needed_blocks, self.blocks_at_end) / self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLife:
    """A job: all its turns, in the order of their arrival, with what lay between them and what was held."""

    job_id: str
    turns: tuple[TurnLife, ...]
    gaps: tuple[GapLife, ...]
    pins: tuple[PinLife, ...]
    finished_s: float | None
    """When it was said, or taken, to be over."""
    trace_was_cut: bool = False
    """The trace has no end, so turns of the job may be missing."""

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
        """A turn of it was still under way where the trace ends, or where it was cut off, its calls."""
        return any(turn.end is TurnEnd.OPEN for turn in self.turns) or self.is_cut_in_calls

    @property
    def is_cut_in_calls(self) -> bool:
        """The trace was cut off before it tells whether a turn followed the job's last calls."""
        if not self.trace_was_cut or self.finished_s is not None or not self.gaps:
            return False
        last = self.gaps[-1]
        return last.started_s >= self.ended_s and last.awaits_turn

    @property
    def overlaps(self) -> bool:
        """Whether some of its turns ran side by side."""
        latest_s = self.turns[0].ended_s
        for turn in self.turns[1:]:
            if turn.arrived_s < latest_s:
                return True
            latest_s = max(latest_s, turn.ended_s)
        return False

    @property
    def spans(self) -> list[Span]:
        """One phase for each moment of its wall time."""
        spans = [span for turn in self.turns for span in turn.spans]
        spans += [gap.span for gap in self.gaps if gap.span is not None]
        return tile(spans, self.began_s, self.ended_s)

    @property
    def seconds(self) -> Seconds:
        """Where its wall time went; adds up to it."""
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
    """A job of what was read of it, at least one turn, in any order."""
    return JobLife(
        job_id=job_id,
        turns=tuple(sorted(turns, key=lambda turn: turn.arrived_s)),
        gaps=tuple(sorted(gaps, key=lambda gap: gap.started_s)),
        pins=tuple(sorted(pins, key=lambda pin: pin.began_s)),
        finished_s=finished_s,
    )
