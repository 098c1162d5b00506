"""What jobs went on without: how much of a frontier nobody will ask for, and which blocks that is.

Who is superseded by whom is told by ``continuation``; blocks are the scheduler's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from continuum.branches import BranchEnd, BranchListener
from continuum.job_registry import JobRegistry
from continuum.jobs import Frontier, Turn
from engine.core.block_hash import BlockHash
from engine.policy import DeadEnd

POOLS_REMEMBERED = 4
"""Whole hashes are kept for so many times the blocks of the pool: what ended before that is in no cache of
the device, and too old to be worth the memory of its name."""


class DeadEnds(BranchListener):
    """Remembers what frontiers hold, and hands out what of it is dead."""

    def __init__(self, jobs: JobRegistry, num_blocks: int, block_size: int, *, of_continued: bool) -> None:
        """``num_blocks``: of the pool. ``of_continued``: also what a turn does not share with the branch that
        it continues."""
        self._jobs = jobs
        self._block_size = block_size
        self._of_continued = of_continued
        self._max_hashes = num_blocks * POOLS_REMEMBERED
        self._num_hashes = 0
        self._hashes: OrderedDict[Frontier, list[BlockHash]] = OrderedDict()
        """Of the frontiers that ended last, oldest first."""
        self._pending: deque[DeadEnd] = deque()

    def __len__(self) -> int:
        """Found and not taken yet."""
        return len(self._pending)

    def on_opened(self, frontier: Frontier, block_hashes: list[BlockHash], now: float) -> None:
        self._hashes[frontier] = block_hashes
        self._num_hashes += len(block_hashes)
        while self._num_hashes > self._max_hashes:
            _, oldest = self._hashes.popitem(last=False)
            self._num_hashes -= len(oldest)

    def on_continued(self, frontier: Frontier, turn: Turn, now: float) -> None:
        if self._of_continued and turn.diverged_at_token is not None:
            self._supersede(frontier, turn, turn.num_known_tokens // self._block_size)
        self._forget(frontier)

    def on_superseded(self, frontier: Frontier, turn: Turn, num_shared_blocks: int, now: float) -> None:
        self._supersede(frontier, turn, num_shared_blocks)

    def on_dropped(self, frontier: Frontier, end: BranchEnd, now: float) -> None:
        self._forget(frontier)

    def _forget(self, frontier: Frontier) -> None:
        """Whether it is remembered or not."""
        self._num_hashes -= len(self._hashes.pop(frontier, ()))

    def _supersede(self, frontier: Frontier, turn: Turn, num_shared_blocks: int) -> None:
        """A turn goes on without the blocks of this frontier behind those it shares; what another frontier or
        open turn may ask for stays. The turn is told how much nobody will ask for, as far as is known."""
        block_hashes = self._hashes.get(frontier, [])
        num_kept = max(num_shared_blocks, self._jobs.num_shared_blocks(frontier, block_hashes, turn))
        dead = block_hashes[num_kept:]
        if dead:
            self._pending.append(DeadEnd(dead, num_kept, frontier.pin, turn.request.request_id))
        turn.supersedes, turn.num_superseded_tokens = frontier.request_id, len(dead) * self._block_size

    def take(self) -> Iterator[DeadEnd]:
        while self._pending:
            yield self._pending.popleft()
