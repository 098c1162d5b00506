"""Checks attention over DeepSeek-V3's latents against its definition in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.measures.closeness import LIMITS, row_error
from engine.worker.attention.backend import AttentionBatch
from engine.worker.gpu.triton_paged import TritonPagedAttention

_LAYER = 1
_SCALE = 192**-0.5
_TIMED_CALLS = 10


@dataclass(frozen=True, slots=True)
class _Sizes:
    model: str
    num_heads: int
    latent: int
    """Numbers of a token's latent; the first ``value`` of them are its value."""
    value: int


_DEEPSEEK = _Sizes(model="DeepSeek-V3", num_heads=128, latent=576, value=512)
_TOY = _Sizes(model="a toy", num_heads=4, latent=48, value=32)


@dataclass(frozen=True, slots=True)
class _Step:
    batch: AttentionBatch
    pool: torch.Tensor
    """[num_blocks, layers, 1, block_size, 1, latent]"""
    query: torch.Tensor
    latent: torch.Tensor


def check(bench: Bench) -> None:
    """Checks decodes, which our kernel computes, and prompts in the same batch, which torch computes."""
    few = bench.sizes.decode_batches[1]
    context = bench.sizes.decode_context
    decodes = [(1, context * (index + 1) // few) for index in range(few)]
    new, cached = bench.sizes.prompt_lengths[1]
    for name, lengths in {
        "decode, B=1": [(1, context)],
        f"decode, B={few}": decodes,
        f"{few} decodes and a prompt": [*decodes, (new, new + cached)],
    }.items():
        with bench.case(f"latents: {name}"):
            _check_case(bench, name, lengths)


def _check_case(bench: Bench, name: str, lengths: Sequence[tuple[int, int]]) -> None:
    sizes = _TOY if bench.sizes.toy else _DEEPSEEK
    dtype = torch.float16 if bench.sizes.toy else torch.bfloat16
    step = _make_step(bench, sizes, lengths, dtype)
    attention = TritonPagedAttention(step.pool)
    attention.begin_step(step.batch)

    def attend() -> torch.Tensor:
        return attention.attend_latent(_LAYER, step.query, step.latent, value_size=sizes.value, scale=_SCALE)

    error = _error(step, attend(), sizes)
    bench.check(f"latents: {name}", error, bench.sizes.slack * LIMITS[dtype])
    if len(step.batch.query_lens) == step.batch.num_decodes:
        seconds = bench.repeats_of_kernels(attend, _TIMED_CALLS)
        read = sum(length for _, length in lengths) * sizes.latent * dtype.itemsize
        bench.figure(
            f"attention over {sizes.model}'s latents, a layer, {name}",
            "us",
            [1e6 * each for each in seconds],
            floor=1e6 * read / bench.rates.copy_bytes_s,
        )


def _make_step(bench: Bench, sizes: _Sizes, lengths: Sequence[tuple[int, int]], dtype: torch.dtype) -> _Step:
    where = bench.device.where
    page = bench.sizes.block_size
    generator = torch.Generator(where).manual_seed(len(lengths))
    query_lens, seq_lens = (np.array(each) for each in zip(*lengths, strict=True))
    blocks_each = -(-seq_lens // page)
    num_blocks = int(blocks_each.sum()) + 1
    tables = np.zeros((len(lengths), blocks_each.max()), np.int64)
    ids = 1 + np.random.default_rng(0).permutation(num_blocks - 1)
    for row, part in enumerate(np.split(ids, blocks_each.cumsum()[:-1])):
        tables[row, : len(part)] = part
    rows = np.repeat(np.arange(len(lengths)), query_lens)
    positions = np.arange(len(rows)) + (seq_lens - query_lens.cumsum())[rows]

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=where, dtype=dtype)

    return _Step(
        AttentionBatch(
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_tables=tables,
            slot_blocks=tables[rows, positions // page],
            slot_offsets=positions % page,
            num_decodes=int((query_lens == 1).sum()),
        ),
        noise(num_blocks, _LAYER + 1, 1, page, 1, sizes.latent),
        noise(len(rows), sizes.num_heads, sizes.latent),
        noise(len(rows), sizes.latent),
    )


def _error(step: _Step, found: torch.Tensor, sizes: _Sizes) -> float:
    """Returns the largest error of any row, by the latents that the pool holds now."""
    page = step.pool.shape[3]
    start = 0
    errors = []
    for row, (new, length) in enumerate(zip(step.batch.query_lens, step.batch.seq_lens, strict=True)):
        blocks = torch.from_numpy(step.batch.block_tables[row, : -(-length // page)]).to(step.pool.device)
        latents = step.pool[blocks, _LAYER, 0].flatten(0, 2)[:length].double()
        places = torch.arange(length, device=latents.device)
        for token in range(start, start + new, max(1, new // 32)):  # all scores would take gigabytes
            seen = places <= length - new + token - start
            scores = step.query[token].double() @ latents[seen].T * _SCALE
            expected = scores.softmax(dim=-1) @ latents[seen, : sizes.value]
            errors.append(row_error(found[token], expected))
        start += new
    return max(errors)
