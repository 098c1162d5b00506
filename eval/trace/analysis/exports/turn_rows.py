"""The base of exports that write a row per answered turn, with its prompt's blocks, in order of arrival."""

from __future__ import annotations

from typing import Generic, TextIO, TypeVar

import msgspec

from eval.trace.analysis.exports.arrivals import InArrivalOrder
from eval.trace.analysis.exports.export import JsonLines, Silent
from eval.trace.analysis.exports.prompt_blocks import PromptBlocks
from eval.trace.analysis.jobs import TurnEnd, TurnLife
from tracing.events import RequestArrived, TraceEvent, TraceHeader

Kept = TypeVar("Kept")
"""Data that an export keeps of a turn until its row may be written."""


class TurnRows(Silent, Generic[Kept]):
    """Leaves out turns for which a row would be incomplete, and counts them."""

    def __init__(self, file: TextIO) -> None:
        self._header: TraceHeader | None = None
        self._lines = JsonLines(file)
        self._encoder = msgspec.json.Encoder()
        self._blocks = PromptBlocks()
        self._order = InArrivalOrder[Kept]()
        self._num_unknown = 0
        self._num_unfinished = 0

    @property
    def header(self) -> TraceHeader:
        assert self._header is not None, "a trace begins with one"
        return self._header

    def keep(self, turn: TurnLife, names: bytes) -> Kept:
        """``names``: of the full blocks of its prompt."""
        raise NotImplementedError

    def write(self, kept: Kept) -> None:
        """Writes the turn's row; all earlier rows are written."""
        raise NotImplementedError

    def notes_of_rows(self) -> list[str]:
        """Returns what the rows do not contain, or contain in an unexpected form."""
        return []

    def event(self, event: TraceEvent) -> None:
        if isinstance(event, TraceHeader):
            self._header = event
        self._blocks.take(event)
        if isinstance(event, RequestArrived):
            self._order.arrive(event.req_id)

    def turn(self, turn: TurnLife) -> None:
        names = self._names(turn)
        for kept in self._order.end(turn.req_id, None if names is None else self.keep(turn, names)):
            self.write(kept)

    def _names(self, turn: TurnLife) -> bytes | None:
        """Returns the names of the prompt's blocks; None if the turn gets no row."""
        names = self._blocks.of(turn.req_id)
        self._blocks.forget(turn.req_id)
        if names is None:
            self._num_unknown += 1
            return None
        if turn.end is not TurnEnd.ENDED:
            self._num_unfinished += 1
            return None
        return names

    def _write_row(self, row: msgspec.Struct) -> None:
        self._lines.write(self._encoder.encode(row).decode())

    def notes(self) -> list[str]:
        notes = [f"{self._lines.num_rows:,} rows", *self.notes_of_rows()]
        if self._num_unfinished:
            notes.append(f"{self._num_unfinished:,} turns were left out: they were not answered to the end")
        if self._num_unknown:
            notes.append(f"{self._num_unknown:,} turns were left out: they arrived before the trace began")
        return notes
