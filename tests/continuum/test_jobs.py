"""Which turn continues which: by block hashes, whatever else a job does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from continuum.jobs import num_shared_blocks


@given(st.lists(st.binary(min_size=1, max_size=1)), st.lists(st.binary(min_size=1, max_size=1)))
def test_shared_blocks_are_the_common_prefix(a: list[bytes], b: list[bytes]) -> None:
    """On chains (each hash tells all before it) the search finds what counting finds."""
    chain_a = [b"".join(a[: i + 1]) for i in range(len(a))]
    chain_b = [b"".join(b[: i + 1]) for i in range(len(b))]
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert num_shared_blocks(chain_a, chain_b) == expected
