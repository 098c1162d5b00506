"""Attention by Triton's kernels, in its interpreter, against a plain fp64 reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.gpu.kv_splits import Splits, SplitScratch
from engine.worker.gpu.step_batch import PromptChunk, StepBatch
from engine.worker.gpu.tiling import Tiling
from engine.worker.gpu.triton_attention import Pages, Scoring, attend_prompts, attend_uniform, write_kv
from engine.worker.gpu.triton_paged import TritonPagedAttention
from tests.worker.attention_reference import (
    LAYER,
    AttentionCase,
    make_case,
    paged_output,
    reference_output,
    with_stale_blocks,
)

FP8 = torch.float8_e4m3fn


@st.composite
def mixed_cases(draw: st.DrawFn) -> AttentionCase:
    """Decodes shortest first, often followed by prompts; with all that a model may choose."""
    num_kv_heads = draw(st.integers(1, 2))
    decodes = sorted(draw(st.lists(st.integers(1, 150), max_size=2)))
    chunks = st.tuples(st.integers(2, 40), st.integers(0, 20) | st.integers(0, 100))
    prompts = draw(st.lists(chunks, min_size=not decodes, max_size=2))
    return make_case(
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from((16, 24, 64))),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16))),
        block_size=draw(st.sampled_from((1, 5, 16, 64))),
        lengths=(*((1, n) for n in decodes), *((n, n + context) for n, context in prompts)),
        seed=draw(st.integers(0, 2**31)),
    )


windows = st.none() | st.sampled_from((1, 16, 33)) | st.integers(1, 150)


@pytest.mark.slow
@settings(max_examples=15)
@given(case=mixed_cases(), window=windows)
def test_a_step_equals_the_reference(case: AttentionCase, window: int | None) -> None:
    """With any lengths, block tables, windows and head groups, decodes and prompts err by no more than the
    roundings of their type."""
    error = (paged_output(case, window, TritonPagedAttention) - reference_output(case, window)).abs()
    assert error.max() < max(1e-5, 4 * torch.finfo(case.pool.dtype).eps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "tile", "window", "num_splits"),
    [(16, 64, None, 4), (64, 32, None, 2), (12, 16, 90, 2), (64, 64, 150, 1), (16, 32, None, 1)],
)
def test_tiles_and_pages_have_sizes_of_their_own(
    page: int, tile: int, window: int | None, num_splits: int
) -> None:
    """A tile may span pages and a page tiles; split or not, the result is the same."""
    lengths = ((1, 3), (1, 390), (9, 140), (5, 300))
    case = make_case(num_kv_heads=2, num_heads=6, dtype=torch.float32, lengths=lengths, block_size=page)
    got = attend(case, Tiling(16, tile, 4, 3), num_splits, num_uniform=2, window=window)
    assert (got - reference_output(case, window)).abs().max() < 1e-5


@pytest.mark.slow
@settings(max_examples=10)
@given(
    uniform_len=st.sampled_from((1, 2, 4, 5)),
    group=st.integers(1, 8),
    contexts=st.lists(st.integers(0, 150), min_size=1, max_size=2),
    num_empty=st.integers(0, 1),
    num_splits=st.sampled_from((1, 2)),
    window=windows,
)
def test_drafts_are_verified_beside_empty_places(
    uniform_len: int, group: int, contexts: list[int], num_empty: int, num_splits: int, window: int | None
) -> None:
    """Each of a sequence's new tokens sees those before it; for a graph's places without a sequence, no
    memory of the pool is read and zeros are written."""
    lengths = tuple((uniform_len, context + uniform_len) for context in contexts)
    case = make_case(num_kv_heads=2, num_heads=2 * group, dtype=torch.float32, lengths=lengths, head_dim=16)
    poison_unused_blocks(case)
    tiling = Tiling(32, 16, 4, 3)
    got = attend(case, tiling, num_splits, len(lengths), window=window, num_empty=num_empty)
    num_real = uniform_len * len(lengths)
    assert (got[:num_real] - reference_output(case, window)).abs().max() < 1e-5
    assert got.shape[0] == num_real + num_empty * uniform_len
    assert not got[num_real:].any()


def test_scores_stay_within_a_soft_cap() -> None:
    """Scores that far exceed the cap are bent to it."""
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=((1, 40), (1, 150), (5, 140)))
    case = replace(case, query=case.query * 50)
    got = attend(case, Tiling(16, 32, 4, 3), 2, num_uniform=2, soft_cap=5.0)
    assert (got - reference_output(case, None, soft_cap=5.0)).abs().max() < 1e-5


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("window", [None, 40])
def test_sinks(num_splits: int, window: int | None) -> None:
    """A head's sink takes its share of the weights once, with any number of splits."""
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=((1, 30), (1, 150), (20, 170)))
    sinks = torch.linspace(-2.0, 4.0, case.query.shape[1])
    got = attend(case, Tiling(16, 32, 4, 3), num_splits, num_uniform=2, window=window, sinks=sinks)
    assert (got - reference_output(case, window, sinks=sinks)).abs().max() < 1e-5


@pytest.mark.parametrize("num_splits", [1, 4])
def test_the_padding_of_a_graph_has_no_sinks(num_splits: int) -> None:
    """The result of padding is zeros."""
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=((1, 30), (1, 150)))
    sinks = torch.linspace(-2.0, 4.0, case.query.shape[1])
    got = attend(case, Tiling(16, 32, 4, 3), num_splits, num_uniform=2, sinks=sinks, num_empty=1)
    assert (got[:-1] - reference_output(case, None, sinks=sinks)).abs().max() < 1e-5
    assert not got[-1].any()


@pytest.mark.parametrize("window", [1, 7, 40])
def test_what_lies_before_a_window_may_be_anything(window: int) -> None:
    """NaN of another sequence is ignored, also in a tile that the window begins in."""
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=((1, 30), (1, 150), (20, 170)))
    stale = with_stale_blocks(case, window)
    got = attend(stale, Tiling(16, 32, 4, 3), 2, num_uniform=2, window=window)
    assert (got - reference_output(case, window)).abs().max() < 1e-5


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("chunk", [1, 7, 32, 64, 200])
def test_a_chunk_is_all_that_its_tokens_see(chunk: int, num_splits: int) -> None:
    """Keys before the chunk of a sequence's first new token may be anything, even NaN."""
    lengths = ((1, 30), (1, 129), (1, 150), (20, 170), (70, 70))
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=lengths)
    stale = with_stale_blocks(case, chunk=chunk)
    got = attend(stale, Tiling(16, 32, 4, 3), num_splits, num_uniform=3, chunk=chunk)
    wanted = reference_output(case, None, chunk=chunk)
    assert (got - wanted).abs().max() < 1e-5
    stale = with_stale_blocks(case, chunk=chunk)
    by_steps = paged_output(stale, None, TritonPagedAttention, chunk=chunk)
    assert (by_steps - wanted).abs().max() < 1e-5


def test_the_padding_of_a_graph_has_no_chunk() -> None:
    """The result of padding is zeros."""
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=((1, 30), (1, 150)))
    got = attend(case, Tiling(16, 32, 4, 3), 2, num_uniform=2, chunk=64, num_empty=1)
    assert (got[:-1] - reference_output(case, None, chunk=64)).abs().max() < 1e-5
    assert not got[-1].any()


@pytest.mark.parametrize("kv_scale", [1.0, 0.25])
def test_kv_of_8_bits_is_attended_as_it_is(kv_scale: float) -> None:
    """Numbers that 8 bits represent exactly are attended to without further error."""
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=((1, 30), (1, 150), (20, 70)))
    case = replace(
        case,
        key=in_8_bits(case.key, kv_scale),
        value=in_8_bits(case.value, kv_scale),
        sequences=[(in_8_bits(key, kv_scale), in_8_bits(value, kv_scale)) for key, value in case.sequences],
    )
    narrow = replace(case, pool=(case.pool / kv_scale).to(FP8))
    got = paged_output(narrow, None, lambda pool: TritonPagedAttention(pool, kv_scale))
    assert (got - reference_output(case, None)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_what_is_written(dtype: torch.dtype) -> None:
    """A token's K and V are in its slot and nowhere else; without a slot they are not written."""
    pages = Pages(*torch.zeros(2, 4, 8, 2, 24).to(dtype))
    rows = in_8_bits(torch.randn(3, 4, 24, generator=torch.Generator().manual_seed(0)), 1.0)
    key, value = rows[:, :2], rows[:, 2:]
    write_kv(pages, key, value, torch.tensor([13, -1, 24]), 0.5 if dtype == FP8 else 1.0)
    for page, row in zip(pages, (key, value), strict=True):
        wanted = torch.zeros(32, 2, 24)
        wanted[13], wanted[24] = row[0], row[2]
        wanted = wanted * 2 if dtype == FP8 else wanted
        assert torch.equal(page.float().flatten(0, 1), wanted)


def test_numbers_too_large_for_8_bits_become_the_largest() -> None:
    """Numbers beyond 8 bits become the largest number, not NaN."""
    pages = Pages(*torch.zeros(2, 2, 8, 1, 16).to(FP8))
    key = torch.tensor([1e6, -1e6, 448, 449]).repeat(4).view(1, 1, 16)
    write_kv(pages, key, -key, torch.tensor([8]), 1.0)
    wanted = torch.tensor([448.0, -448, 448, 448]).repeat(4)
    assert torch.equal(pages.keys[1, 0, 0].float(), wanted)
    assert torch.equal(pages.values[1, 0, 0].float(), -wanted)


@pytest.mark.slow
def test_a_query_may_be_part_of_something_larger() -> None:
    """Queries, keys and values are read with the strides of a product."""
    case = make_case(num_kv_heads=2, dtype=torch.float32)
    wanted = paged_output(case, None, TritonPagedAttention)
    fused = torch.cat((case.query, case.key, case.value), dim=1)
    parts = torch.split(fused, [case.query.shape[1], 2, 2], dim=1)
    assert not any(part.is_contiguous() for part in parts)
    parted = replace(case, query=parts[0], key=parts[1], value=parts[2])
    assert torch.equal(paged_output(parted, None, TritonPagedAttention), wanted)


def attend(
    case: AttentionCase,
    tiling: Tiling,
    num_splits: int,
    num_uniform: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_empty: int = 0,
) -> torch.Tensor:
    """The kernels' result, tiled and split, in fp64. The first ``num_uniform`` sequences have equal numbers
    of tokens; ``num_empty`` places without a sequence follow."""
    step = device_step(case, num_uniform, num_empty)
    pages = Pages(case.pool[:, LAYER, 0], case.pool[:, LAYER, 1])
    write_kv(pages, case.key, case.value, step.slots, 1.0)
    query = torch.cat((case.query, case.query.new_ones(num_empty * step.uniform_len, *case.query.shape[1:])))
    output = torch.full_like(query, float("nan"))
    splits = Splits(num_splits, 32, SplitScratch.allocate(query.shape[2], query.device))
    splits.scratch.log_sums.fill_(float("nan"))
    scoring = Scoring(query.shape[2] ** -0.5, window, soft_cap, sinks, chunk=chunk)
    n = step.num_uniform_tokens
    attend_uniform(output[:n], query[:n], pages, step, scoring, tiling, splits)
    if step.prompts:
        attend_prompts(output[n:], query[n:], pages, step, scoring, tiling, splits)
    return output.double()


def device_step(case: AttentionCase, num_uniform: int, num_empty: int) -> StepBatch:
    """The case's step, its block tables in rows of a larger table."""
    batch = case.batch
    num_seqs = len(batch.query_lens)
    uniform_len = int(batch.query_lens[0])
    assert (batch.query_lens[:num_uniform] == uniform_len).all()
    assert not num_empty or num_uniform == num_seqs
    query_lens = np.append(batch.query_lens, [uniform_len] * num_empty)
    starts = np.append(0, query_lens.cumsum())
    rows = torch.randperm(num_seqs + num_empty + 2, generator=torch.Generator().manual_seed(num_seqs))
    rows = rows[: num_seqs + num_empty]
    tables = torch.full((num_seqs + num_empty + 2, batch.block_tables.shape[1]), 2**31 - 1, dtype=torch.int32)
    tables[rows[:num_seqs]] = torch.from_numpy(batch.block_tables).int()
    slots = torch.from_numpy(batch.slot_blocks * case.pool.shape[3] + batch.slot_offsets)
    return StepBatch(
        rows=rows.int(),
        query_starts=torch.from_numpy(starts).int(),
        seq_lens=torch.from_numpy(np.append(batch.seq_lens, [0] * num_empty)).int(),
        block_tables=tables,
        positions=torch.empty(0, dtype=torch.int64),
        slots=slots,
        num_uniform=num_uniform + num_empty,
        uniform_len=uniform_len,
        max_uniform_seq_len=int(batch.seq_lens[:num_uniform].max()),
        prompts=tuple(
            PromptChunk(seq, int(starts[seq]), int(batch.query_lens[seq]), int(batch.seq_lens[seq]))
            for seq in range(num_uniform, num_seqs)
        ),
    )


def poison_unused_blocks(case: AttentionCase) -> None:
    """Writes NaN to the blocks that no sequence has, so that reading one shows."""
    used = torch.zeros(len(case.pool), dtype=torch.bool)
    used[torch.from_numpy(case.batch.block_tables).flatten()] = True
    used[0] = False
    case.pool[~used] = float("nan")


def in_8_bits(numbers: torch.Tensor, scale: float) -> torch.Tensor:
    return (numbers / scale).to(FP8).to(numbers.dtype) * scale
