"""The host tier keeps count of its slots under any sequence of operations, and gives up the right ones."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.host_tier import HostTier

NUM_SLOTS = 6

HASHES = st.integers(0, 9).map(lambda number: f"{number}".encode())


class HostTierMachine(RuleBasedStateMachine):
    """Contents come and are used by transfers; a plain dict remembers in which slot each of them was put."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(NUM_SLOTS)
        self.slots: dict[bytes, int] = {}
        self.transfers: list[list[bytes]] = []

    @property
    def users(self) -> Counter[bytes]:
        return Counter(block_hash for transfer in self.transfers for block_hash in transfer)

    @rule(hashes=st.lists(HASHES, min_size=1, max_size=4, unique=True))
    def store(self, hashes: list[bytes]) -> None:
        """What is new gets a slot that no transfer uses, unless there is none."""
        stored: list[bytes] = []
        for block_hash in hashes:
            known, in_use = block_hash in self.tier, {self.slots[h] for h in [*self.users, *stored]}
            slot = self.tier.add(block_hash)
            assert (slot is None) == (known or len(in_use) == NUM_SLOTS)
            if slot is not None:
                assert slot not in in_use
                self.slots[block_hash] = slot
                stored.append(block_hash)
        if stored:
            self.transfers.append(stored)

    @rule(hashes=st.lists(HASHES, min_size=1, max_size=4, unique=True))
    def read(self, hashes: list[bytes]) -> None:
        """What is found lies where it was put."""
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

    @rule(hashes=st.lists(HASHES, unique=True))
    def touch(self, hashes: list[bytes]) -> None:
        self.tier.touch(hashes)

    @rule()
    def reset(self) -> None:
        assert self.tier.reset() is not bool(self.transfers)

    @invariant()
    def slots_are_accounted_for(self) -> None:
        self.tier.check_invariants(dict(self.users))
        contents = self.tier.contents()
        assert len(self.tier) == len(contents)
        assert all(self.slots[block_hash] == slot for block_hash, slot in contents.items())


TestHostTier = HostTierMachine.TestCase
TestHostTier.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def put(tier: HostTier, *hashes: bytes) -> None:
    """Store and be done with it."""
    tier.release([block_hash for block_hash in hashes if tier.add(block_hash) is not None])


def test_the_least_recently_used_gives_way() -> None:
    """A content that was just of use stays; one that a transfer reads stays in any case."""
    tier = HostTier(3)
    for block_hash in (b"a", b"b", b"c"):
        put(tier, block_hash)
    tier.touch([b"a"])
    tier.acquire([b"b"])
    put(tier, b"d")
    assert [h in tier for h in (b"a", b"b", b"c", b"d")] == [True, True, False, True]


def test_the_tail_of_a_prefix_gives_way_first() -> None:
    """Of blocks used together the first is the last to go: without it the others cannot be found."""
    tier = HostTier(3)
    put(tier, b"0", b"1", b"2")
    tier.touch([b"0", b"1", b"2"])
    put(tier, b"other")
    assert tier.count_held([b"0", b"1", b"2"]) == 2
