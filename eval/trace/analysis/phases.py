"""What a turn does in each second of its life, and how seconds are added up. Knows nothing of traces."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from itertools import pairwise
from math import fsum
from operator import attrgetter


class Phase(Enum):
    """What a turn, or the time between two turns, is doing. In the order in which a job's second that several
    of its turns share is given to one of them: the furthest on first."""

    DECODE = "decode"
    """Its answer is being made: from the first token on."""
    PREFILL = "prefill"
    """Its prompt is being computed, up to the first token."""
    RECOMPUTE = "recompute"
    """What was lost to a preemption is being recomputed."""
    LOAD = "load"
    """It has its blocks and waits for copies from the host tier, or for the step after them."""
    PREEMPTED = "preempted"
    """It ran, lost its blocks and waits to run again."""
    WAIT = "wait"
    """It waits to be admitted: for memory, or for its place."""
    GRAMMAR = "grammar"
    """It is not in the queue yet: the grammar of its answer is being compiled."""
    TOOL = "tool"
    """Between two turns: the calls of the first are under way, by all that is known."""
    CLIENT = "client"
    """Between two turns: nothing was called."""


_RANK = {phase: rank for rank, phase in enumerate(Phase)}


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one phase; times are those of the engine's clock."""

    phase: Phase
    start_s: float
    end_s: float
    memory_s: float = 0.0
    """Part of a wait during which the engine had budget and slots to give, but not the memory."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def cut(self, start_s: float, end_s: float) -> Span:
        """The part between two moments within it, with its share of the wait for memory."""
        if start_s == self.start_s and end_s == self.end_s:
            return self
        share = (end_s - start_s) / self.duration_s if self.duration_s else 0.0
        return Span(self.phase, start_s, end_s, self.memory_s * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Where time went. The fields add up to the time that was looked at."""

    queue_s: float = 0.0
    """Waiting for the step in flight, the token budget, a free batch slot or the policy's consent."""
    memory_s: float = 0.0
    """Waiting for memory: for its own, or behind others that wait for theirs."""
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
        """For its place, for memory, or to run again."""
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
"""The fields of ``Seconds`` in words."""


def seconds_of(spans: Iterable[Span]) -> Seconds:
    """The spans' durations by phase; a wait is told apart into memory and place."""
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
    """Where a job's wall time went, of the spans of its turns and gaps: every moment from its first turn's
    arrival to its last turn's end is given to one phase."""
    of_turns = [span for span in spans if span.phase not in (Phase.TOOL, Phase.CLIENT)]
    if not of_turns:
        return Seconds()
    began_s, ended_s = min(span.start_s for span in of_turns), max(span.end_s for span in of_turns)
    return seconds_of(tile(spans, began_s, ended_s))


def tile(spans: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
    """One phase for each moment from start to end: where spans overlap the furthest on counts, where there is
    none the client has the time. Each begins where the one before it ends."""
    tiles: list[Span] = []
    for piece in _pieces(spans, start_s, end_s):
        last = tiles[-1] if tiles else None
        if last is not None and last.phase is piece.phase:
            tiles[-1] = Span(last.phase, last.start_s, piece.end_s, last.memory_s + piece.memory_s)
        else:
            tiles.append(piece)
    return tiles


def _pieces(spans: Sequence[Span], start_s: float, end_s: float) -> Iterator[Span]:
    """Between each two moments at which a span begins or ends: the part of the one that counts."""
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
