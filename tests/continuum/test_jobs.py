"""Which turn continues which, found by block hashes."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from engine.records.block_chain import BlockChain


@given(st.lists(st.binary(min_size=1, max_size=1)), st.lists(st.binary(min_size=1, max_size=1)))
def test_shared_blocks_are_the_common_prefix(a: list[bytes], b: list[bytes]) -> None:
    """Binary search on chains (each hash covers all before it) equals counting."""
    chain_a = [sha256(b"".join(a[: i + 1])).digest() for i in range(len(a))]
    chain_b = [sha256(b"".join(b[: i + 1])).digest() for i in range(len(b))]
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert BlockChain(chain_a).num_shared(chain_b) == expected
    assert len(BlockChain(chain_a)) == len(a)
