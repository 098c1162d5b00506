"""Mooncake rows: one request per line with ids of its prompt's blocks of 512 tokens, in named sessions.

A row lists the whole prompt if its blocks begin with those of the previous row, as readers of sessions
expect. If a session's first prompt fills no block, its rows state what they add; a prompt that diverges from
the previous one begins a new session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO

import msgspec

from eval.trace.analysis.exports.turn_rows import TurnRows
from eval.trace.analysis.jobs import GapLife, TurnLife
from tracing.events import BLOCK_NAME_BYTES

BLOCK_TOKENS = 512


class Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of the file."""

    timestamp: int
    """Milliseconds since the trace began."""
    delay: float | None = None
    """Milliseconds since the previous answer; for all but the first row of a session."""
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    session_id: str


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn whose row is not written yet."""

    life: TurnLife
    ids: tuple[int, ...]
    """Ids of the blocks of 512 tokens that its prompt fills."""


@dataclass(slots=True)
class _Session:
    """The rows of one chain of turns so far."""

    name: str
    last: _Turn
    ids: tuple[int, ...] = ()
    """Ids of the last row; empty if it stated what it added."""


class MooncakeExport(TurnRows[_Turn]):
    """Writes rows in the order of arrival; requests without a job are sessions of one row."""

    def __init__(self, file: TextIO) -> None:
        super().__init__(file)
        self._ids: dict[bytes, int] = {}
        self._num_ids = 0
        self._continues: dict[str, str] = {}
        """The request that each request continues."""
        self._sessions: dict[str, _Session] = {}
        """Sessions by the request of their last row."""
        self._num_branches: dict[str, int] = {}
        self._num_added = 0
        """Rows that state what they add."""

    def gap(self, gap: GapLife) -> None:
        if gap.next_req_id is not None:
            self._continues[gap.next_req_id] = gap.req_id
        else:
            self._sessions.pop(gap.req_id, None)

    def keep(self, turn: TurnLife, names: bytes) -> _Turn:
        size = self.header.block_size
        ends = range(BLOCK_TOKENS, turn.num_prompt_tokens + 1, BLOCK_TOKENS)
        places = [(end // size - 1) * BLOCK_NAME_BYTES for end in ends]
        return _Turn(turn, tuple(self._id(names[at : at + BLOCK_NAME_BYTES]) for at in places))

    def _id(self, name: bytes) -> int:
        """Returns the id of the 512-token block that contains the end of the block with this name."""
        found = self._ids.get(name)
        if found is None:
            found = self._ids[name] = self._new_id()
        return found

    def _new_id(self) -> int:
        self._num_ids += 1
        return self._num_ids - 1

    def write(self, kept: _Turn) -> None:
        life = kept.life
        session = self._sessions.pop(self._continues.pop(life.req_id, ""), None)
        added = self._added(session, kept) if session is not None else None
        if session is None or added is None:
            session = _Session(self._name(life), kept)
            added = life.num_prompt_tokens
        whole = added == life.num_prompt_tokens
        delay_ms = None
        if session.last is not kept and life.gap_s is not None:
            delay_ms = round(1000 * life.gap_s, 3)
        session.last = kept
        session.ids = kept.ids if whole else ()
        self._num_added += not whole
        self._sessions[life.req_id] = session
        row = Row(
            timestamp=round(1000 * (life.arrived_s - self.header.monotonic_s)),
            delay=delay_ms,
            input_length=added,
            output_length=life.num_output_tokens,
            hash_ids=self._row_ids(kept) if whole else [],
            session_id=session.name,
        )
        self._write_row(row)

    def _added(self, session: _Session, turn: _Turn) -> int | None:
        """Returns the row's ``input_length`` within the session; None if the row cannot continue it."""
        before = session.last.life
        now = turn.life
        ids = session.ids
        if ids:
            grows = now.num_prompt_tokens > before.num_prompt_tokens
            return now.num_prompt_tokens if grows and turn.ids[: len(ids)] == ids else None
        added = now.num_prompt_tokens - before.num_prompt_tokens - before.num_output_tokens
        return added if added > 0 else None

    def _name(self, life: TurnLife) -> str:
        """Returns the job's name; a branch gets a number after it."""
        name = life.job_id or life.req_id
        branch = self._num_branches[name] = self._num_branches.get(name, 0) + 1
        return name if branch == 1 else f"{name}#{branch}"

    def _row_ids(self, turn: _Turn) -> list[int]:
        """Returns the row's ids, with a unique one for a partial block."""
        rest = turn.life.num_prompt_tokens % BLOCK_TOKENS
        return [*turn.ids, self._new_id()] if rest else list(turn.ids)

    def notes_of_rows(self) -> list[str]:
        notes: list[str] = []
        branches = sum(number - 1 for number in self._num_branches.values())
        if branches:
            notes.append(f"{branches:,} prompts diverge from the one before, and begin separate sessions")
        if self._num_added:
            told = "say what they add and have no ids: their session's first prompt fills no block"
            notes.append(f"{self._num_added:,} of them {told}")
        size = self.header.block_size
        if BLOCK_TOKENS % size:
            notes.append(f"blocks of {size} tokens do not fill {BLOCK_TOKENS}: ids are approximate")
        return notes
