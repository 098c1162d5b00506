"""Tracks which block contents are in which slots of host memory or of a disk, and which is evicted next.

The least recently used contents are evicted first. A slot that a transfer uses is busy: its content is found
but never evicted. This module knows nothing of requests or of the device's blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from engine.core.kv_cache.block_hash import BlockHash

if TYPE_CHECKING:
    from engine.core.kv_cache.kv_event_recorder import TierRecorder

OnDropped = Callable[[BlockHash, int], None]
"""Called with a content that is evicted and its slot, which another content will be written into."""


class BlockTier:
    """A set of block hashes with a slot for each. All operations are O(1) per block."""

    recorder: TierRecorder | None = None
    """Records which contents are no longer found; None: not recorded."""

    def __init__(self, num_blocks: int, on_dropped: OnDropped | None = None) -> None:
        assert num_blocks >= 1, "a tier without slots is no tier"
        self.num_blocks = num_blocks
        self._on_dropped = on_dropped
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[BlockHash, int] = OrderedDict()
        """Slots of contents that no transfer uses, the least recently used first."""
        self._busy: dict[BlockHash, int] = {}
        """Slots of contents that at least one transfer uses."""
        self._num_more_users: dict[BlockHash, int] = {}
        """Number of transfers beyond the first that use a content, where there are any."""
        self._reserved: set[int] = set()
        """Slots that are being filled, whose content is found only when that is done."""
        self._retired: list[int] = []
        """Slots that cannot be filled."""
        self._stale: set[BlockHash] = set()
        """Idle contents that no request is expected to need: they are evicted first, and not passed on."""

    def __len__(self) -> int:
        """The number of contents that are found here."""
        return len(self._idle) + len(self._busy)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._idle or block_hash in self._busy

    def count_held(self, block_hashes: Iterable[BlockHash]) -> int:
        """How many of these are here, from the first on and without a gap."""
        count = 0
        for block_hash in block_hashes:
            if block_hash not in self:
                break
            count += 1
        return count

    def acquire(self, block_hashes: Iterable[BlockHash]) -> list[int]:
        """Slots of contents that are here, which are busy until released as often as acquired."""
        slots: list[int] = []
        for block_hash in block_hashes:
            slot = self._busy.get(block_hash)
            if slot is None:
                slot = self._busy[block_hash] = self._idle.pop(block_hash)
                self._stale.discard(block_hash)
            else:
                self._num_more_users[block_hash] = self._num_more_users.get(block_hash, 0) + 1
            slots.append(slot)
        return slots

    def add(self, block_hash: BlockHash) -> int | None:
        """Acquire a slot for a new content; None if it is here already or all slots are busy."""
        if block_hash in self:
            return None
        slot = self._take_slot()
        if slot is not None:
            self._busy[block_hash] = slot
        return slot

    @property
    def num_usable(self) -> int:
        """Slots that are free, or whose contents may be evicted."""
        return len(self._free) + len(self._idle)

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._idle:
            return None
        block_hash, slot = self._idle.popitem(last=False)
        if self.recorder is not None:
            self.recorder.removed(block_hash)
        if block_hash in self._stale:
            self._stale.remove(block_hash)
        elif self._on_dropped is not None:
            self._on_dropped(block_hash, slot)
        return slot

    def reserve(self) -> int | None:
        """Reserve a slot whose content is found once it is filled; None if all are busy."""
        slot = self._take_slot()
        if slot is not None:
            self._reserved.add(slot)
        return slot

    def fill(self, slot: int, block_hash: BlockHash | None) -> None:
        """Put this content into a reserved slot, as the most recently used; None if it is of no use."""
        self._reserved.remove(slot)
        if block_hash is None or block_hash in self:
            self._free.append(slot)
        else:
            self._idle[block_hash] = slot

    def retire(self, slot: int) -> None:
        """Give up a reserved slot that cannot be filled: it is not used again before ``reset``."""
        self._reserved.remove(slot)
        self._retired.append(slot)

    def release(self, block_hashes: Sequence[BlockHash]) -> None:
        """Remove a user of each; the first is evicted last, as the head of a prefix is worth the most."""
        for block_hash in reversed(block_hashes):
            num_more = self._num_more_users.pop(block_hash, 0)
            if num_more > 1:
                self._num_more_users[block_hash] = num_more - 1
            elif not num_more:
                self._idle[block_hash] = self._busy.pop(block_hash)

    def touch(self, block_hashes: Sequence[BlockHash]) -> None:
        """Make these the most recently used; those that are not here are passed over."""
        idle = self._idle
        for block_hash in reversed(block_hashes):
            if block_hash in idle:
                idle.move_to_end(block_hash)
                self._stale.discard(block_hash)

    def evict_first(self, block_hashes: Iterable[BlockHash]) -> None:
        """Let the idle contents of a chain's end be evicted before all others, the last one first.

        No request is expected to need them.
        """
        idle = self._idle
        for block_hash in block_hashes:
            if block_hash in idle:
                idle.move_to_end(block_hash, last=False)
                self._stale.add(block_hash)

    def discard(self, block_hashes: Iterable[BlockHash]) -> None:
        """Evict contents that are of no use, except for those that a transfer uses."""
        for block_hash in block_hashes:
            slot = self._idle.pop(block_hash, None)
            if slot is not None:
                self._free.append(slot)
                self._stale.discard(block_hash)
                if self.recorder is not None:
                    self.recorder.removed(block_hash)

    def contents(self) -> dict[BlockHash, int]:
        """Every content and its slot."""
        return {**self._idle, **self._busy}

    def reset(self) -> bool:
        """Evict all; False, and nothing is changed, while a transfer uses a slot."""
        if self._busy:
            return False
        self._free += [*self._retired, *self._idle.values()]
        self._retired.clear()
        self._idle.clear()
        self._stale.clear()
        return True

    def check_invariants(self, num_users: dict[BlockHash, int], reserved: Iterable[int] = ()) -> None:
        """Raise AssertionError unless each slot has one state and each content exactly these users.

        ``reserved`` are the slots that are being filled.
        """
        slots = [*self._free, *self.contents().values(), *self._reserved, *self._retired]
        assert sorted(slots) == list(range(self.num_blocks)), "a slot is lost or has two owners"
        assert self._reserved == set(reserved)
        assert not self._idle.keys() & self._busy.keys()
        assert self._stale <= self._idle.keys()
        users = {h: 1 + self._num_more_users.get(h, 0) for h in self._busy}
        assert users == num_users, "a slot has lost a user or has too many"
        assert self._num_more_users.keys() <= self._busy.keys()
