"""A tier stays consistent under any sequence of operations, and evicts the right contents."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.offload.block_tier import BlockTier

NUM_SLOTS = 6

HASHES = st.integers(0, 9).map(lambda number: f"{number}".encode())


class BlockTierMachine(RuleBasedStateMachine):
    """Contents are stored and used by transfers; a plain dict records the slot of each."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = BlockTier(NUM_SLOTS, self.note_dropped)
        self.slots: dict[bytes, int] = {}
        self.transfers: list[list[bytes]] = []
        self.reserved: list[int] = []
        self.num_retired = 0
        self.dropped: list[bytes] = []

    def note_dropped(self, block_hash: bytes, slot: int) -> None:
        """Checks that the dropped content was stored there, unused by transfers."""
        assert self.slots[block_hash] == slot
        assert block_hash not in self.users
        self.dropped.append(block_hash)

    def check_dropped(self, stored: bytes | None) -> None:
        """Checks that at most one content was dropped, and is gone."""
        assert len(self.dropped) <= 1
        assert not any(block_hash in self.tier for block_hash in self.dropped), "told to be gone, and there"
        assert stored not in self.dropped
        self.dropped.clear()

    @property
    def users(self) -> Counter[bytes]:
        return Counter(block_hash for transfer in self.transfers for block_hash in transfer)

    @rule(hashes=st.lists(HASHES, min_size=1, max_size=4, unique=True))
    def store(self, hashes: list[bytes]) -> None:
        """New contents get slots that no transfer uses, if there are any."""
        stored: list[bytes] = []
        for block_hash in hashes:
            known, in_use = block_hash in self.tier, {self.slots[h] for h in [*self.users, *stored]}
            in_use.update(self.reserved)
            slot = self.tier.add(block_hash)
            assert (slot is None) == (known or len(in_use) == NUM_SLOTS - self.num_retired)
            if slot is not None:
                assert slot not in in_use
                self.slots[block_hash] = slot
                stored.append(block_hash)
                self.check_dropped(block_hash)
        if stored:
            self.transfers.append(stored)

    @rule(hashes=st.lists(HASHES, min_size=1, max_size=4, unique=True))
    def read(self, hashes: list[bytes]) -> None:
        """Contents are found where they were stored."""
        found = hashes[: self.tier.count_held(hashes)]
        if found:
            assert self.tier.acquire(found) == [self.slots[block_hash] for block_hash in found]
            self.transfers.append(found)

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), failed=st.booleans())
    def end(self, data: st.DataObject, failed: bool) -> None:
        hashes = self.transfers.pop(data.draw(st.integers(0, len(self.transfers) - 1)))
        self.tier.release(hashes)
        if failed:
            self.tier.discard(hashes)
            assert all((block_hash in self.tier) == (block_hash in self.users) for block_hash in hashes)

    @rule()
    def reserve(self) -> None:
        """A reserved slot has no other user."""
        in_use = {self.slots[h] for h in self.users} | set(self.reserved)
        slot = self.tier.reserve()
        assert (slot is None) == (len(in_use) == NUM_SLOTS - self.num_retired)
        if slot is not None:
            assert slot not in in_use
            self.reserved.append(slot)
            self.check_dropped(None)

    @precondition(lambda self: self.reserved)
    @rule(block_hash=st.none() | HASHES)
    def fill(self, block_hash: bytes | None) -> None:
        """A filled slot can be found, and is evicted last."""
        slot, known = self.reserved.pop(0), block_hash is not None and block_hash in self.tier
        self.tier.fill(slot, block_hash)
        if block_hash is not None and not known:
            assert block_hash in self.tier
            self.slots[block_hash] = slot

    @precondition(lambda self: self.reserved)
    @rule()
    def retire(self) -> None:
        self.tier.retire(self.reserved.pop())
        self.num_retired += 1

    @rule(hashes=st.lists(HASHES, unique=True))
    def touch(self, hashes: list[bytes]) -> None:
        self.tier.touch(hashes)

    @rule()
    def reset(self) -> None:
        """Reset forgets everything except slots being filled, and retries retired slots."""
        assert self.tier.reset() is not bool(self.transfers)
        if not self.transfers:
            self.num_retired = 0
            assert len(self.tier) == 0

    @invariant()
    def slots_are_accounted_for(self) -> None:
        self.tier.check_invariants(dict(self.users), self.reserved)
        contents = self.tier.contents()
        assert len(self.tier) == len(contents)
        assert all(self.slots[block_hash] == slot for block_hash, slot in contents.items())


TestBlockTier = BlockTierMachine.TestCase
TestBlockTier.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def put(tier: BlockTier, *hashes: bytes) -> None:
    """Stores without a transfer."""
    tier.release([block_hash for block_hash in hashes if tier.add(block_hash) is not None])


def test_the_least_recently_used_gives_way() -> None:
    """A recently used content stays; one that a transfer reads is never evicted."""
    tier = BlockTier(3)
    for block_hash in (b"a", b"b", b"c"):
        put(tier, block_hash)
    tier.touch([b"a"])
    tier.acquire([b"b"])
    put(tier, b"d")
    assert [h in tier for h in (b"a", b"b", b"c", b"d")] == [True, True, False, True]


def test_the_tail_of_a_prefix_gives_way_first() -> None:
    """Of blocks used together the first is evicted last: without it the others cannot be found."""
    tier = BlockTier(3)
    put(tier, b"0", b"1", b"2")
    tier.touch([b"0", b"1", b"2"])
    put(tier, b"other")
    assert tier.count_held([b"0", b"1", b"2"]) == 2
