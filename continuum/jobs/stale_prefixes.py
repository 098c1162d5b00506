"""Stale prefixes: which blocks of a branch tip no turn will request.

``continuation`` decides which tip a turn supersedes; the scheduler manages the blocks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from continuum.jobs.branches import BranchEnd, BranchListener
from continuum.jobs.job import BranchTip, Turn
from continuum.jobs.registry import JobRegistry
from engine.core.kv_cache.block_hash import BlockHash
from engine.core.policy import StalePrefix
from engine.core.request import Request

POOLS_REMEMBERED = 4
"""Full hashes are kept for this many times the blocks of the pool: older tips are no longer in the device's
cache, so their hashes are not worth the memory."""


class StalePrefixes(BranchListener):
    """Remembers the blocks of branch tips, and returns those that have become stale."""

    def __init__(self, jobs: JobRegistry, num_blocks: int, block_size: int, *, of_continued: bool) -> None:
        """``num_blocks`` is the size of the pool. With ``of_continued``, the blocks that a turn does not
        share with the branch that it continues are stale, too."""
        self._jobs = jobs
        self._block_size = block_size
        self._of_continued = of_continued
        self._max_hashes = num_blocks * POOLS_REMEMBERED
        self._num_hashes = 0
        self._hashes: OrderedDict[BranchTip, list[BlockHash]] = OrderedDict()
        """Hashes of the tips that ended most recently, oldest first."""
        self._pending: deque[StalePrefix] = deque()

    def __len__(self) -> int:
        """The number of stale prefixes that have not been taken yet."""
        return len(self._pending)

    def on_opened(self, tip: BranchTip, block_hashes: list[BlockHash], now: float) -> None:
        self._remember(tip, block_hashes)

    def on_prewarmed(self, tip: BranchTip, request: Request, now: float) -> None:
        """Remembers the blocks of the request in place of the tip's. Those in which they differ are stale: a
        client has written the reply differently, or an early result went on within its last block."""
        assert tip.ahead is not None
        known = self._hashes.get(tip)
        if known is None:
            return
        num_kept = max(tip.ahead.num_shared(known), self._jobs.num_shared_blocks(tip, known, None))
        if known[num_kept:]:
            self._pending.append(StalePrefix(known[num_kept:], num_kept, None, request.request_id))
        self._forget(tip)
        self._remember(tip, request.block_hashes[: len(tip.ahead)])

    def _remember(self, tip: BranchTip, block_hashes: list[BlockHash]) -> None:
        self._hashes[tip] = block_hashes
        self._num_hashes += len(block_hashes)
        while self._num_hashes > self._max_hashes:
            _, oldest = self._hashes.popitem(last=False)
            self._num_hashes -= len(oldest)

    def on_continued(self, tip: BranchTip, turn: Turn, now: float) -> None:
        if self._of_continued and turn.diverged_at_token is not None:
            num_shared_tokens = max(turn.num_known_tokens, turn.num_ahead_tokens)
            self._supersede(tip, turn, num_shared_tokens // self._block_size)
        self._forget(tip)

    def on_superseded(self, tip: BranchTip, turn: Turn, num_shared_blocks: int, now: float) -> None:
        self._supersede(tip, turn, num_shared_blocks)

    def on_dropped(self, tip: BranchTip, end: BranchEnd, now: float) -> None:
        self._forget(tip)

    def _forget(self, tip: BranchTip) -> None:
        """Forget a tip, whether it is remembered or not."""
        self._num_hashes -= len(self._hashes.pop(tip, ()))

    def _supersede(self, tip: BranchTip, turn: Turn, num_shared_blocks: int) -> None:
        """Marks the blocks of this tip as stale that the turn does not share; blocks that another tip or open
        turn may request stay. Records in the turn how many tokens are known to be stale."""
        block_hashes = self._hashes.get(tip, [])
        num_kept = max(num_shared_blocks, self._jobs.num_shared_blocks(tip, block_hashes, turn))
        stale = block_hashes[num_kept:]
        if stale:
            self._pending.append(StalePrefix(stale, num_kept, tip.pin, turn.request.request_id))
        turn.supersedes = tip.request_id
        turn.num_superseded_tokens = len(stale) * self._block_size

    def take(self) -> Iterator[StalePrefix]:
        while self._pending:
            yield self._pending.popleft()
