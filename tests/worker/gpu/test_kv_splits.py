"""The number of parts that the KV of a step is split into."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.gpu.kv_splits import MAX_SPLITS, KvSplitter, Splits, SplitScratch

NUM_PROCESSORS = 132
NUM_HEADS, NUM_KV_HEADS = 32, 8


def splitter(num_places: int = 130_000) -> KvSplitter:
    scratch = SplitScratch(
        torch.empty((num_places, 1), device="meta"), torch.empty(num_places, device="meta")
    )
    return KvSplitter.for_few_queries(scratch, NUM_PROCESSORS)


def splits_of(num_seqs: int, longest: int) -> Splits:
    """The splits of decodes."""
    return splitter().choose(
        num_programs=num_seqs * NUM_KV_HEADS, num_rows=num_seqs * NUM_HEADS, longest=longest
    )


def test_one_sequence_keeps_every_processor_busy() -> None:
    """A single sequence of some length is split among more programs than there are processors."""
    splits = splits_of(1, 4096)
    assert splits.number * NUM_KV_HEADS > NUM_PROCESSORS
    assert splits.number * splits.min_part <= 4096


def test_many_sequences_are_split_only_where_they_are_long() -> None:
    """Sequences that fill the device are left whole, unless one may be far longer than the others."""
    assert splits_of(128, 4096).number == 1
    may_be_long = splits_of(128, 131_072)
    assert may_be_long.number == 8
    assert may_be_long.min_part == 4096


def test_short_sequences_are_left_whole() -> None:
    """The time saved on a short sequence is less than that of merging."""
    assert splits_of(1, 128).number == 1


@given(
    num_programs=st.integers(1, 10_000),
    num_rows=st.integers(1, 100_000),
    longest=st.integers(1, 200_000),
    num_places=st.integers(1, 200_000),
)
def test_results_of_parts_fit_into_the_scratch(
    num_programs: int, num_rows: int, longest: int, num_places: int
) -> None:
    """Results always fit; the number of parts is a power of two, as merging requires."""
    number = splitter(num_places).choose(num_programs=num_programs, num_rows=num_rows, longest=longest).number
    assert 1 <= number <= MAX_SPLITS
    assert number & (number - 1) == 0
    assert number == 1 or number * num_rows <= num_places


@given(
    num_seqs=st.integers(8, 1024),
    num_heads=st.integers(1, 128),
    longest=st.integers(1, 2**20),
    num_places=st.integers(1, 200_000),
)
def test_a_prefix_takes_the_parts_that_are_left(
    num_seqs: int, num_heads: int, longest: int, num_places: int
) -> None:
    """All parts are merged at once: their total is a power of two that fits into the scratch, divided between
    both passes. Without space for two there is no pass."""
    num_rows = num_seqs * num_heads
    sizes = {"num_programs": num_seqs, "num_rows": num_rows, "longest": longest}
    both = splitter(num_places).choose_beside_prefix(**sizes)
    assert (both is None) == (num_places < 2 * num_rows)
    if both is None:
        return
    own, prefix = both
    assert own.total == prefix.total in (2, 4, 8, 16, 32)
    assert own.total * num_rows <= num_places
    assert (own.first, prefix.first) == (0, own.number)
    assert own.number + prefix.number == own.total
    assert own.number <= prefix.number
    assert own.min_part == splitter(num_places).choose(**sizes).min_part
