"""How layers are grouped: every layer once, groups of equal size, full attention first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.records.kv_cache_groups import KVCacheGroup, groups_of, num_slots


def test_layers_of_one_kind_are_one_group() -> None:
    (group,) = groups_of([None] * 4)
    assert group.layers == (0, 1, 2, 3)
    assert group.is_full
    (group,) = groups_of([128] * 4)
    assert group.sliding_window == 128


def test_alternating_windows_are_two_groups() -> None:
    full, window = groups_of([128, None] * 3)
    assert full.layers == (1, 3, 5)
    assert full.is_full
    assert window.layers == (0, 2, 4)
    assert window.sliding_window == 128


def test_five_windows_to_one_full_layer_are_six_groups() -> None:
    groups = groups_of(([512] * 5 + [None]) * 3)
    assert [group.sliding_window for group in groups] == [None, *[512] * 5]
    assert num_slots(groups) == 3
    assert groups[1].layers == (0, 6, 12)


def test_nearly_equal_kinds_are_padded() -> None:
    groups = groups_of([None] * 4 + [64] * 5)
    assert len(groups) == 2
    assert num_slots(groups) == 5


def test_layers_of_chunks_are_groups_of_their_own() -> None:
    """Like in Llama 4, every fourth layer has full attention and the others form groups of chunks."""
    groups = groups_of([None] * 12, [8192, 8192, 8192, None] * 3)
    assert [group.attention_chunk for group in groups] == [None, 8192, 8192, 8192]
    assert [group.is_full for group in groups] == [True, False, False, False]
    assert groups[0].layers == (3, 7, 11)
    assert groups[2].layers == (1, 5, 9)
    windows_too = groups_of([None, 16, None], [None, None, 16])
    assert [(each.sliding_window, each.attention_chunk) for each in windows_too] == [
        (None, None),
        (16, None),
        (None, 16),
    ]


@given(st.sampled_from([1, 4, 16]), st.integers(1, 70))
def test_what_is_held_of_chunks_is_bounded(block_size: int, chunk: int) -> None:
    """For each number of blocks, those with a token of the open chunk are held; the bound is tight."""
    group = KVCacheGroup((0,), attention_chunk=chunk)
    held = []
    for num_blocks in range(chunk * 16 // block_size + 1):
        end = num_blocks * block_size
        held.append(len({place // block_size for place in range(end - end % chunk, end)}))
        assert group.num_blocks_held(block_size, num_blocks) == held[-1]
    assert max(held) == group.max_blocks_held(block_size, 10_000)


@given(st.lists(st.sampled_from([None, 16, 64, 100]), min_size=1, max_size=40))
def test_every_layer_is_in_one_group(windows: list[int | None]) -> None:
    groups = groups_of(windows)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.sliding_window for group in groups for layer in group.layers)
    assert [group.is_full for group in groups] == sorted((group.is_full for group in groups), reverse=True)
