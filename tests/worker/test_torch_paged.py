"""Paged attention against a plain fp64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker.attention_reference import (
    MIXED_LENGTHS,
    AttentionCase,
    make_case,
    paged_output,
    reference_output,
    with_stale_blocks,
)

WINDOWS = (None, 1, 7, 1000)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_equals_the_reference(num_kv_heads: int, window: int | None) -> None:
    """Decodes, fresh prompts and chunks after a context are right in one batch, with any head groups."""
    case = make_case(num_kv_heads=num_kv_heads, dtype=torch.float32)
    error = (paged_output(case, window) - reference_output(case, window)).abs().max()
    assert error < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_error_is_that_of_the_inputs(dtype: torch.dtype) -> None:
    """In 16 bits the result is off by no more than a few roundings of its own type."""
    case = make_case(num_kv_heads=2, dtype=dtype)
    error = (paged_output(case, None) - reference_output(case, None)).abs().max()
    assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("window", [1, 7, 20])
def test_what_lies_before_a_window_may_be_anything(window: int) -> None:
    """NaN of another sequence, which a weight of 0 would not cancel, changes nothing."""
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=(*MIXED_LENGTHS, (9, 200)))
    got = paged_output(with_stale_blocks(case, window), window)
    assert (got - reference_output(case, window)).abs().max() < 1e-5


@pytest.mark.parametrize("chunk", [1, 7, 8, 20, 64, 1000])
def test_a_chunk_is_all_that_its_tokens_see(chunk: int) -> None:
    """Keys before the chunk of a sequence's first new token may be anything, even NaN."""
    lengths = (*MIXED_LENGTHS, (9, 200), (150, 200), (64, 64), (600, 1300))
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=lengths)
    got = paged_output(with_stale_blocks(case, chunk=chunk), None, chunk=chunk)
    assert (got - reference_output(case, None, chunk=chunk)).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(2.0, False), (None, True), (2.0, True)])
def test_soft_caps_and_sinks(soft_cap: float | None, has_sinks: bool, window: int | None) -> None:
    """Scores are capped, and a head's sink takes its share of the weights."""
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=(*MIXED_LENGTHS, (150, 200)))
    sinks = torch.linspace(-2.0, 4.0, case.query.shape[1]) if has_sinks else None
    got = paged_output(case, window, soft_cap=soft_cap, sinks=sinks)
    assert (got - reference_output(case, window, soft_cap, sinks)).abs().max() < 1e-5


def test_long_chunk_in_several_tiles() -> None:
    """A chunk longer than a tile, after a context, is masked as one."""
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=((700, 1300), (3, 3)))
    for window in (None, 600):
        error = (paged_output(case, window) - reference_output(case, window)).abs().max()
        assert error < 1e-5


def test_decodes_of_very_different_length() -> None:
    """Short sequences are not padded to the longest: groups are cut, and results are right."""
    lengths = tuple((1, n) for n in (1, 2, 9, 64, 65, 400, 410))
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=lengths)
    error = (paged_output(case, None) - reference_output(case, None)).abs().max()
    assert error < 1e-5


def test_a_block_is_contiguous_over_all_layers() -> None:
    """A block's content is contiguous, so that it moves in one copy."""
    case: AttentionCase = make_case(num_kv_heads=2, dtype=torch.float32)
    assert case.pool[3].is_contiguous()
    assert np.prod(case.pool.shape[1:]) == case.pool.stride(0)
