"""The resources of the attention kernels on a Hopper GPU, launched for a model like Llama-3.1-8B."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.worker.gpu import triton_attention
from engine.worker.gpu.kv_splits import KvSplitter, Splits, SplitScratch
from engine.worker.gpu.step_batch import PromptChunk, SharedPrefix, StepBatch
from engine.worker.gpu.tiling import prefix_tiling, prompt_tiling, uniform_tiling
from engine.worker.gpu.triton_attention import (
    Pages,
    Scoring,
    attend_prefix,
    attend_prompts,
    attend_uniform,
    write_kv,
)
from tests.worker.gpu.sm90 import MAX_SHARED_BYTES, LaunchRecorder, compile_all_for_sm90

pytestmark = pytest.mark.slow

NUM_LAYERS, NUM_KV_HEADS, GROUP = 32, 8, 4
REGISTERS = 65536
"""Registers of a processor (CUDA C++ Programming Guide, table of compute capabilities)."""
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
POOLS = ((BF16, 16, 128), (BF16, 64, 128), (FP8, 16, 128), (BF16, 16, 256))
"""Type, page and head_dim."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, LaunchRecorder]:
    """The recorder of each kernel; no kernel runs."""
    names = ("uniform_kernel", "prefix_kernel", "prompt_kernel", "merge_kernel", "write_kernel")
    recorders = {name: LaunchRecorder(getattr(triton_attention, name)) for name in names}
    for name, recorder in recorders.items():
        monkeypatch.setattr(triton_attention, name, recorder)
    return recorders


def test_decodes_and_drafts(launches: dict[str, LaunchRecorder]) -> None:
    """Nothing is spilled, and enough programs fit on a processor to hide memory latency."""
    for pool in POOLS:
        launch_uniform(*pool, uniform_len=4)
    builds = launches["uniform_kernel"].builds
    assert len(builds) == len(POOLS)
    for used in compile_all_for_sm90(builds):
        assert used.spill_bytes == 0
        assert used.registers * 4 * 32 * 4 <= REGISTERS
        assert used.shared_bytes * 4 <= MAX_SHARED_BYTES


@pytest.mark.parametrize("shared_bytes", [MAX_SHARED_BYTES, 99 * 1024])
def test_prompts(shared_bytes: int, launches: dict[str, LaunchRecorder]) -> None:
    """The tiles of Hopper and of other GPUs fit into shared memory. Nothing is spilled, except a few numbers
    by tiles that were a fifth faster on an H200."""
    for pool in POOLS:
        launch_prompts(*pool, shared_bytes)
    builds = launches["prompt_kernel"].builds
    assert len(builds) == len(POOLS)
    for used in compile_all_for_sm90(builds):
        assert used.spill_bytes <= (48 if shared_bytes == MAX_SHARED_BYTES else 0)
        assert used.shared_bytes <= shared_bytes


@pytest.mark.parametrize("num_seqs", [8, 64])
def test_prefixes(num_seqs: int, launches: dict[str, LaunchRecorder]) -> None:
    """Few rows use the tiles of decodes, many those of prompts. Neither these nor the pass over the rest
    spill, and the tiles fit into the shared memory of all GPUs."""
    for pool in POOLS:
        launch_prefix(*pool, num_seqs)
    builds = launches["prefix_kernel"].builds + launches["uniform_kernel"].builds
    assert len(builds) == 2 * len(POOLS)
    for used in compile_all_for_sm90(builds):
        assert used.spill_bytes == 0
        assert used.shared_bytes <= 99 * 1024


def test_wide_heads(launches: dict[str, LaunchRecorder]) -> None:
    """Kernels for heads of 512 numbers, as in Gemma 4's layers without a window, fit on all GPUs, and spill a
    few numbers at most."""
    pool = (BF16, 16, 512)
    launch_uniform(*pool, uniform_len=4)
    launch_prompts(*pool, 99 * 1024)
    launch_prefix(*pool, 64)
    names = ("uniform_kernel", "prompt_kernel", "prefix_kernel")
    builds = [build for name in names for build in launches[name].builds]
    assert len(builds) >= 3
    for used in compile_all_for_sm90(builds):
        assert used.spill_bytes <= 16
        assert used.shared_bytes <= 99 * 1024


def test_merging_and_writing(launches: dict[str, LaunchRecorder]) -> None:
    """The small kernels spill nothing either."""
    launch_uniform(BF16, 16, 128, uniform_len=1)
    key = torch.empty((64, NUM_KV_HEADS, 128), dtype=BF16, device="meta")
    write_kv(pages_of(FP8, 16, 128), key, key, torch.empty(64, dtype=torch.int64, device="meta"), 1.0)
    builds = [build for name in ("merge_kernel", "write_kernel") for build in launches[name].builds]
    assert len(builds) == 2
    for used in compile_all_for_sm90(builds):
        assert used.spill_bytes == 0


def launch_uniform(dtype: torch.dtype, page: int, head_dim: int, uniform_len: int) -> None:
    query = queries(64 * uniform_len, head_dim)
    attend_uniform(
        torch.empty_like(query),
        query,
        pages_of(dtype, page, head_dim),
        step(64, uniform_len),
        Scoring(head_dim**-0.5),
        uniform_tiling(head_dim, dtype),
        Splits(8, 128, SplitScratch.allocate(head_dim, torch.device("meta"))),
    )


def launch_prefix(dtype: torch.dtype, page: int, head_dim: int, num_seqs: int) -> None:
    query, pages = queries(num_seqs, head_dim), pages_of(dtype, page, head_dim)
    numbers = torch.empty(num_seqs, dtype=torch.int32, device="meta")
    batch = replace(step(num_seqs, 1), prefix=SharedPrefix(numbers, numbers))
    splitter = KvSplitter.for_few_queries(SplitScratch.allocate(head_dim, torch.device("meta")), 132)
    both = splitter.choose_beside_prefix(
        num_programs=num_seqs * NUM_KV_HEADS, num_rows=num_seqs * GROUP * NUM_KV_HEADS, longest=131_072
    )
    assert both is not None
    splits, of_prefix = both
    scoring, tiling = (
        Scoring(head_dim**-0.5),
        prefix_tiling(num_seqs * GROUP, head_dim, dtype),
    )
    attend_prefix(query, pages, batch, scoring, tiling, of_prefix)
    uniform = uniform_tiling(head_dim, dtype)
    attend_uniform(torch.empty_like(query), query, pages, batch, scoring, uniform, splits)


def launch_prompts(dtype: torch.dtype, page: int, head_dim: int, shared_bytes: int) -> None:
    query = queries(2048, head_dim)
    attend_prompts(
        torch.empty_like(query),
        query,
        pages_of(dtype, page, head_dim),
        step(0, 1, (PromptChunk(0, 0, 2048, 34_816),)),
        Scoring(head_dim**-0.5),
        prompt_tiling(head_dim, dtype, shared_bytes),
        Splits(1, 1024, SplitScratch.allocate(head_dim, torch.device("meta"))),
    )


def queries(num_tokens: int, head_dim: int) -> torch.Tensor:
    """Queries with the strides of a fused weight's product."""
    fused = torch.empty((num_tokens, (GROUP + 2) * NUM_KV_HEADS, head_dim), dtype=BF16, device="meta")
    return fused[:, : GROUP * NUM_KV_HEADS]


def pages_of(dtype: torch.dtype, page: int, head_dim: int) -> Pages:
    pool = torch.empty((128, NUM_LAYERS, 2, page, NUM_KV_HEADS, head_dim), dtype=dtype, device="meta")
    return Pages(pool[:, 0, 0], pool[:, 0, 1])


def step(num_uniform: int, uniform_len: int, prompts: tuple[PromptChunk, ...] = ()) -> StepBatch:
    numbers = torch.empty(num_uniform + len(prompts) + 1, dtype=torch.int32, device="meta")
    return StepBatch(
        rows=numbers,
        query_starts=numbers,
        seq_lens=numbers,
        block_tables=numbers.expand(256, -1),
        positions=torch.empty(0, dtype=torch.int64, device="meta"),
        slots=torch.empty(0, dtype=torch.int64, device="meta"),
        num_uniform=num_uniform,
        uniform_len=uniform_len,
        max_uniform_seq_len=131_072,
        prompts=prompts,
    )
