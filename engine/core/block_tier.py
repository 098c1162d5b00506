"""Which block contents lie in which slots of a pool, and which of them may give way: the books of host
memory, and of a disk.

Least recently used contents go first. A slot that a transfer uses is busy: found, but never reused. Knows no
requests and no device blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from engine.core.block_hash import BlockHash

OnDropped = Callable[[BlockHash, int], None]
"""A content gave way to another, which will be written into its slot."""


class BlockTier:
    """A set of block hashes with a slot for each; all operations are O(1) per block."""

    def __init__(self, num_blocks: int, on_dropped: OnDropped | None = None) -> None:
        assert num_blocks >= 1, "a tier without slots is no tier"
        self.num_blocks = num_blocks
        self._on_dropped = on_dropped
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[BlockHash, int] = OrderedDict()
        """Least recently used first."""
        self._busy: dict[BlockHash, int] = {}
        """Used by one transfer at least."""
        self._num_more_users: dict[BlockHash, int] = {}
        """Transfers beyond the first: there seldom is one."""
        self._reserved: set[int] = set()
        """Being filled: found only when that is done."""
        self._retired: list[int] = []
        self._dead: set[BlockHash] = set()
        """Idle contents that nobody is expected to ask for: they give way first, and go nowhere."""

    def __len__(self) -> int:
        """Contents that are found."""
        return len(self._idle) + len(self._busy)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._idle or block_hash in self._busy

    def count_held(self, block_hashes: Iterable[BlockHash]) -> int:
        """How many of these, from the first on, are there without a gap."""
        count = 0
        for block_hash in block_hashes:
            if block_hash not in self:
                break
            count += 1
        return count

    def acquire(self, block_hashes: Iterable[BlockHash]) -> list[int]:
        """Slots of contents that are there; busy until released as often as acquired."""
        slots: list[int] = []
        for block_hash in block_hashes:
            slot = self._busy.get(block_hash)
            if slot is None:
                slot = self._busy[block_hash] = self._idle.pop(block_hash)
                self._dead.discard(block_hash)
            else:
                self._num_more_users[block_hash] = self._num_more_users.get(block_hash, 0) + 1
            slots.append(slot)
        return slots

    def add(self, block_hash: BlockHash) -> int | None:
        """A slot for a new content, acquired; None if it is there already or all slots are busy."""
        if block_hash in self:
            return None
        slot = self._take_slot()
        if slot is not None:
            self._busy[block_hash] = slot
        return slot

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._idle:
            return None
        block_hash, slot = self._idle.popitem(last=False)
        if block_hash in self._dead:
            self._dead.remove(block_hash)
        elif self._on_dropped is not None:
            self._on_dropped(block_hash, slot)
        return slot

    def reserve(self) -> int | None:
        """A slot that is to be filled, in nobody's sight until it is; None if all are busy."""
        slot = self._take_slot()
        if slot is not None:
            self._reserved.add(slot)
        return slot

    def fill(self, slot: int, block_hash: BlockHash | None) -> None:
        """A reserved slot holds this content from now on, the most recently used; None: nothing of use."""
        self._reserved.remove(slot)
        if block_hash is None or block_hash in self:
            self._free.append(slot)
        else:
            self._idle[block_hash] = slot

    def retire(self, slot: int) -> None:
        """A reserved slot cannot be filled: it is not used again before all is forgotten."""
        self._reserved.remove(slot)
        self._retired.append(slot)

    def release(self, block_hashes: Sequence[BlockHash]) -> None:
        """One user less for each. The first gives way last: the head of a prefix is worth the most."""
        for block_hash in reversed(block_hashes):
            num_more = self._num_more_users.pop(block_hash, 0)
            if num_more > 1:
                self._num_more_users[block_hash] = num_more - 1
            elif not num_more:
                self._idle[block_hash] = self._busy.pop(block_hash)

    def touch(self, block_hashes: Sequence[BlockHash]) -> None:
        """These were just of use; those that are not there are passed over."""
        idle = self._idle
        for block_hash in reversed(block_hashes):
            if block_hash in idle:
                idle.move_to_end(block_hash)
                self._dead.discard(block_hash)

    def give_way_first(self, block_hashes: Iterable[BlockHash]) -> None:
        """The end of a chain that nobody is expected to ask for any more: its idle contents give way before
        all others, its last one first."""
        idle = self._idle
        for block_hash in block_hashes:
            if block_hash in idle:
                idle.move_to_end(block_hash, last=False)
                self._dead.add(block_hash)

    def discard(self, block_hashes: Iterable[BlockHash]) -> None:
        """Forget contents that cannot be had; those that another transfer uses are its own to judge."""
        for block_hash in block_hashes:
            slot = self._idle.pop(block_hash, None)
            if slot is not None:
                self._free.append(slot)
                self._dead.discard(block_hash)

    def contents(self) -> dict[BlockHash, int]:
        """Every content and its slot."""
        return {**self._idle, **self._busy}

    def reset(self) -> bool:
        """Forget all; False, and no change, while a transfer uses a slot."""
        if self._busy:
            return False
        self._free += [*self._retired, *self._idle.values()]
        self._retired.clear()
        self._idle.clear()
        self._dead.clear()
        return True

    def check_invariants(self, num_users: dict[BlockHash, int], reserved: Iterable[int] = ()) -> None:
        """Raise AssertionError unless each slot has one place, each content these users, and these slots are
        being filled."""
        slots = [*self._free, *self.contents().values(), *self._reserved, *self._retired]
        assert sorted(slots) == list(range(self.num_blocks)), "a slot is lost or has two owners"
        assert self._reserved == set(reserved)
        assert not self._idle.keys() & self._busy.keys()
        assert self._dead <= self._idle.keys()
        users = {h: 1 + self._num_more_users.get(h, 0) for h in self._busy}
        assert users == num_users, "a slot has lost a user or has too many"
        assert self._num_more_users.keys() <= self._busy.keys()
