"""Paged attention against a plain fp64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker.attention_reference import AttentionCase, make_case, paged_output, reference_output

WINDOWS = (None, 1, 7, 1000)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_equals_the_reference(num_kv_heads: int, window: int | None) -> None:
    """Decodes, fresh prompts and chunks behind a context, in one batch, at any grouping of heads."""
    case = make_case(num_kv_heads=num_kv_heads, dtype=torch.float32)
    error = (paged_output(case, window) - reference_output(case, window)).abs().max()
    assert error < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_error_is_that_of_the_inputs(dtype: torch.dtype) -> None:
    """In 16 bits the result is off by no more than a few roundings of its own type."""
    case = make_case(num_kv_heads=2, dtype=dtype)
    error = (paged_output(case, None) - reference_output(case, None)).abs().max()
    assert error < 4 * torch.finfo(dtype).eps


def test_long_chunk_in_several_tiles() -> None:
    """A chunk longer than a tile, behind a context, is masked as one."""
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=((700, 1300), (3, 3)))
    for window in (None, 600):
        error = (paged_output(case, window) - reference_output(case, window)).abs().max()
        assert error < 1e-5


def test_decodes_of_very_different_length() -> None:
    """Short sequences are not padded to the longest: the groups are cut, the results are right."""
    lengths = tuple((1, n) for n in (1, 2, 9, 64, 65, 400, 410))
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=lengths)
    error = (paged_output(case, None) - reference_output(case, None)).abs().max()
    assert error < 1e-5


def test_a_block_is_contiguous_over_all_layers() -> None:
    """All that a block holds lies in one piece, so that it moves in one copy."""
    case: AttentionCase = make_case(num_kv_heads=2, dtype=torch.float32)
    assert case.pool[3].is_contiguous()
    assert np.prod(case.pool.shape[1:]) == case.pool.stride(0)
