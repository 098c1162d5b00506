"""The phase of a turn in each second, and sums over phases. Knows nothing of traces."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from itertools import pairwise
from math import fsum
from operator import attrgetter


class Phase(Enum):
    """The phase of a turn, or of the time between two turns. If several turns of a job share a second, it
    counts for the phase that is listed first here."""

    DECODE = "decode"
    """It generates its answer, from the first token on."""
    PREFILL = "prefill"
    """Its prompt is being computed, up to the first token."""
    RECOMPUTE = "recompute"
    """Tokens lost to a preemption are being recomputed."""
    LOAD = "load"
    """It has its blocks and waits for copies from the host tier, or for the step after them."""
    PREEMPTED = "preempted"
    """It ran, lost its blocks and waits to run again."""
    WAIT = "wait"
    """It waits to be admitted: for memory, or for its place."""
    GRAMMAR = "grammar"
    """It is not in the queue yet: the grammar of its answer is being compiled."""
    TOOL = "tool"
    """Between two turns: the first one's calls are assumed to run."""
    CLIENT = "client"
    """Between two turns: nothing was called."""


_RANK = {phase: rank for rank, phase in enumerate(Phase)}


@dataclass(frozen=True, slots=True)
class Span:
    """A period of one phase; times are those of the engine's clock."""

    phase: Phase
    start_s: float
    end_s: float
    memory_s: float = 0.0
    """Part of a wait during which the engine had free budget and slots, but no memory."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def cut(self, start_s: float, end_s: float) -> Span:
        """Returns the part between two moments, with its share of the wait for memory."""
        if start_s == self.start_s and end_s == self.end_s:
            return self
        share = (end_s - start_s) / self.duration_s if self.duration_s else 0.0
        return Span(self.phase, start_s, end_s, self.memory_s * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Time by phase. The fields add up to the period."""

    queue_s: float = 0.0
    """Waiting for the step in flight, the token budget, a free batch slot or the policy's consent."""
    memory_s: float = 0.0
    """Waiting for memory: for itself, or after others that wait for memory."""
    grammar_s: float = 0.0
    """Waiting for the grammar of its answer, before it joined the queue."""
    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    recompute_s: float = 0.0
    tool_s: float = 0.0
    client_s: float = 0.0

    @property
    def total_s(self) -> float:
        return fsum(getattr(self, field.name) for field in fields(self))

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for its place, for memory, or to run again."""
        return self.queue_s + self.memory_s + self.preempted_s

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        )


PHASE_NAMES = {
    "queue_s": "waiting for its place",
    "memory_s": "waiting for memory",
    "grammar_s": "waiting for its grammar",
    "load_s": "loading from host memory or disk",
    "prefill_s": "prefill",
    "decode_s": "decode",
    "preempted_s": "preempted",
    "recompute_s": "recomputing after it",
    "tool_s": "tool calls",
    "client_s": "between turns, no call known",
}
"""Names of the fields of ``Seconds``."""


def seconds_of(spans: Iterable[Span]) -> Seconds:
    """Returns the spans' durations by phase; splits waits into memory and place."""
    by_phase = dict.fromkeys(Phase, 0.0)
    memory_s = 0.0
    for span in spans:
        by_phase[span.phase] += span.duration_s
        memory_s += span.memory_s
    return Seconds(
        queue_s=by_phase[Phase.WAIT] - memory_s,
        memory_s=memory_s,
        grammar_s=by_phase[Phase.GRAMMAR],
        load_s=by_phase[Phase.LOAD],
        prefill_s=by_phase[Phase.PREFILL],
        decode_s=by_phase[Phase.DECODE],
        preempted_s=by_phase[Phase.PREEMPTED],
        recompute_s=by_phase[Phase.RECOMPUTE],
        tool_s=by_phase[Phase.TOOL],
        client_s=by_phase[Phase.CLIENT],
    )


def job_seconds(spans: Sequence[Span]) -> Seconds:
    """Returns a job's wall time by phase, from its spans: every moment from its first turn's arrival to its
    last turn's end counts for one phase."""
    of_turns = [span for span in spans if span.phase not in (Phase.TOOL, Phase.CLIENT)]
    if not of_turns:
        return Seconds()
    began_s = min(span.start_s for span in of_turns)
    ended_s = max(span.end_s for span in of_turns)
    return seconds_of(tile(spans, began_s, ended_s))


def tile(spans: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
    """Returns one phase for each moment from start to end: of overlapping spans the furthest phase counts,
    without any the client has the time. Each tile begins where the one before it ends."""
    tiles: list[Span] = []
    for piece in _pieces(spans, start_s, end_s):
        last = tiles[-1] if tiles else None
        if last is not None and last.phase is piece.phase:
            tiles[-1] = Span(last.phase, last.start_s, piece.end_s, last.memory_s + piece.memory_s)
        else:
            tiles.append(piece)
    return tiles


def _pieces(spans: Sequence[Span], start_s: float, end_s: float) -> Iterator[Span]:
    """Yields, between each two moments at which a span begins or ends, the part of the span that counts."""
    moments = {start_s, end_s, *(span.start_s for span in spans), *(span.end_s for span in spans)}
    inside = sorted(moment for moment in moments if start_s <= moment <= end_s)
    coming = sorted(spans, key=attrgetter("start_s"), reverse=True)
    under_way: list[tuple[int, float, int]] = []
    by_number: dict[int, Span] = {}
    for moment, following in pairwise(inside):
        while coming and coming[-1].start_s <= moment:
            span = coming.pop()
            by_number[len(by_number)] = span
            heapq.heappush(under_way, (_RANK[span.phase], span.start_s, len(by_number) - 1))
        while under_way and by_number[under_way[0][2]].end_s <= moment:
            heapq.heappop(under_way)
        if under_way:
            yield by_number[under_way[0][2]].cut(moment, following)
        else:
            yield Span(Phase.CLIENT, moment, following)
