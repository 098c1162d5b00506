"""Mooncake rows: one request per line with ids of its prompt's blocks of 512 tokens, sessions named.

A row is whole where its blocks begin with those of the row before, as readers of sessions take it then. Where
a session's first prompt fills no block, its rows say what they add; where a prompt parts from the one before,
it begins a session of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO

import msgspec

from tracing.analysis.exports.arrivals import InArrivalOrder
from tracing.analysis.exports.export import JsonLines, Silent
from tracing.analysis.exports.prompt_blocks import PromptBlocks
from tracing.analysis.jobs import GapLife, TurnEnd, TurnLife
from tracing.events import BLOCK_NAME_BYTES, RequestArrived, TraceEvent, TraceHeader

BLOCK_TOKENS = 512


class Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of the file."""

    timestamp: int
    """Milliseconds since the trace began."""
    delay: float | None = None
    """Milliseconds since the answer before; of all but the first row of a session."""
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    session_id: str


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn whose row is to come."""

    life: TurnLife
    ids: tuple[int, ...]
    """Of the blocks of 512 tokens that its prompt fills."""


@dataclass(slots=True)
class _Session:
    """The rows of one chain of turns so far."""

    name: str
    last: _Turn
    ids: tuple[int, ...] = ()
    """As the last row has them: none if it said what it added."""


class MooncakeExport(Silent):
    """Writes rows in the order of arrival; requests of no job are sessions of one row."""

    def __init__(self, file: TextIO) -> None:
        self._lines = JsonLines(file)
        self._encoder = msgspec.json.Encoder()
        self._blocks = PromptBlocks()
        self._order = InArrivalOrder[_Turn]()
        self._ids: dict[bytes, int] = {}
        self._num_ids = 0
        self._header: TraceHeader | None = None
        self._continues: dict[str, str] = {}
        """By request, the one that it continues."""
        self._sessions: dict[str, _Session] = {}
        """By the request of their last row."""
        self._num_branches: dict[str, int] = {}
        self._num_added = 0
        """Rows that say what they add."""
        self._num_unknown = 0
        self._num_unfinished = 0

    def event(self, event: TraceEvent) -> None:
        if isinstance(event, TraceHeader):
            self._header = event
        self._blocks.take(event)
        if isinstance(event, RequestArrived):
            self._order.arrive(event.req_id)

    def gap(self, gap: GapLife) -> None:
        if gap.next_req_id is not None:
            self._continues[gap.next_req_id] = gap.req_id
        else:
            self._sessions.pop(gap.req_id, None)

    def turn(self, turn: TurnLife) -> None:
        for ready in self._order.end(turn.req_id, self._known(turn)):
            self._write(ready)

    def _known(self, turn: TurnLife) -> _Turn | None:
        names = self._blocks.of(turn.req_id)
        self._blocks.forget(turn.req_id)
        if names is None or self._header is None:
            self._num_unknown += 1
            return None
        if turn.end is not TurnEnd.ENDED:
            self._num_unfinished += 1
            return None
        size = self._header.block_size
        ends = range(BLOCK_TOKENS, turn.num_prompt_tokens + 1, BLOCK_TOKENS)
        places = [(end // size - 1) * BLOCK_NAME_BYTES for end in ends]
        return _Turn(turn, tuple(self._id(names[at : at + BLOCK_NAME_BYTES]) for at in places))

    def _id(self, name: bytes) -> int:
        """Of the block of 512 tokens that ends with, or within, the one of this name."""
        found = self._ids.get(name)
        if found is None:
            found = self._ids[name] = self._new_id()
        return found

    def _new_id(self) -> int:
        self._num_ids += 1
        return self._num_ids - 1

    def _write(self, turn: _Turn) -> None:
        life = turn.life
        session = self._sessions.pop(self._continues.pop(life.req_id, ""), None)
        added = self._added(session, turn) if session is not None else None
        if session is None or added is None:
            session = _Session(self._name(life), turn)
            added = life.num_prompt_tokens
        whole = added == life.num_prompt_tokens
        delay_ms = None
        if session.last is not turn and life.gap_s is not None:
            delay_ms = round(1000 * life.gap_s, 3)
        session.last, session.ids = turn, turn.ids if whole else ()
        self._num_added += not whole
        self._sessions[life.req_id] = session
        row = Row(
            timestamp=round(1000 * (life.arrived_s - self._began_s)),
            delay=delay_ms,
            input_length=added,
            output_length=life.num_output_tokens,
            hash_ids=self._row_ids(turn) if whole else [],
            session_id=session.name,
        )
        self._lines.write(self._encoder.encode(row).decode())

    @property
    def _began_s(self) -> float:
        return self._header.monotonic_s if self._header is not None else 0.0

    def _added(self, session: _Session, turn: _Turn) -> int | None:
        """The row's ``input_length`` within the session; None if it cannot be told there."""
        before, now = session.last.life, turn.life
        ids = session.ids
        if ids:
            grows = now.num_prompt_tokens > before.num_prompt_tokens
            return now.num_prompt_tokens if grows and turn.ids[: len(ids)] == ids else None
        added = now.num_prompt_tokens - before.num_prompt_tokens - before.num_output_tokens
        return added if added > 0 else None

    def _name(self, life: TurnLife) -> str:
        """The job's; a branch has a number behind it."""
        name = life.job_id or life.req_id
        branch = self._num_branches[name] = self._num_branches.get(name, 0) + 1
        return name if branch == 1 else f"{name}#{branch}"

    def _row_ids(self, turn: _Turn) -> list[int]:
        """With one more of its own for a block that is not full."""
        rest = turn.life.num_prompt_tokens % BLOCK_TOKENS
        return [*turn.ids, self._new_id()] if rest else list(turn.ids)

    def notes(self) -> list[str]:
        notes = [f"{self._lines.num_rows:,} rows"]
        branches = sum(number - 1 for number in self._num_branches.values())
        if branches:
            notes.append(f"{branches:,} prompts part from the one before, and begin sessions of their own")
        if self._num_added:
            told = "say what they add and have no ids: their session's first prompt fills no block"
            notes.append(f"{self._num_added:,} of them {told}")
        size = self._header.block_size if self._header is not None else BLOCK_TOKENS
        if BLOCK_TOKENS % size:
            notes.append(f"blocks of {size} tokens do not fill {BLOCK_TOKENS}: ids are approximate")
        if self._num_unfinished:
            notes.append(f"{self._num_unfinished:,} turns were left out: they were not answered to the end")
        if self._num_unknown:
            notes.append(f"{self._num_unknown:,} turns were left out: they arrived before the trace began")
        return notes
