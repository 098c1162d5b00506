"""Paged attention on a CPU by the compiled kernels; prefill uses torch where the CPU lacks AVX512_BF16."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from engine.worker.attention.backend import AttentionBatch
from engine.worker.attention.chosen_latents import (
    ChosenTokens,
    LatentChoice,
    LatentSequence,
    attend_sequences,
)
from engine.worker.attention.layer_places import LayerPlaces, num_groups, one_table
from engine.worker.attention.torch_paged import TorchPagedAttention
from engine.worker.attention.torch_step import latent_sequences
from engine.worker.cpu.attention_kernel import CpuKernel, HeadAddresses, PoolAddress, SequenceAddresses

LATENT_UNIT = 32
SequencesByGroup = ctypes.Array[SequenceAddresses]
"""The same sequences with the block tables of each KV cache group."""


class CpuPagedAttention:
    """An AttentionBackend over a pool [num_blocks, num_slots, num_vectors, block_size, num_kv_heads,
    head_dim].

    The result for a sequence does not depend on the others of its step; it is equal to the last bit.
    """

    def __init__(self, pool: torch.Tensor, kernel: CpuKernel, places: LayerPlaces | None = None) -> None:
        """``kernel``: loaded for the pool's head_dim and dtype. ``places``: by default, the layers are one KV
        cache group."""
        assert pool[0].is_contiguous(), "a block may have other bytes behind it"
        self._pool = pool
        self._kernel = kernel
        self._torch = None if kernel.has_prefill else TorchPagedAttention(pool, places)
        self.places = one_table(pool.shape[1]) if places is None else places
        values_at = pool.stride(2) if pool.shape[2] > 1 else 0
        self._address = PoolAddress(
            pool.data_ptr(), pool.stride(0), pool.stride(1), values_at, pool.stride(3), *pool.shape[3:5]
        )
        self._heads = HeadAddresses()
        self._batch: AttentionBatch | None = None
        """Keeps the arrays at the addresses alive."""
        groups = SequenceAddresses * num_groups(self.places)
        self._decodes, self._prompts = groups(), groups()
        self._num_threads = 1
        self._chosen = ChosenTokens()
        self._longer: dict[int, list[LatentSequence]] = {}
        """The sequences of a step whose latents are chosen, by group."""

    @property
    def library(self) -> ctypes.CDLL:
        """The library of the compiled kernels."""
        return self._kernel.library

    @property
    def addresses(self) -> tuple[PoolAddress, SequencesByGroup, SequencesByGroup]:
        """The pool and, for each KV cache group, the step's sequences: those with a single new token, and the
        others."""
        return self._address, self._decodes, self._prompts

    def begin_step(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._chosen = ChosenTokens()
        self._longer = {}
        self._num_threads = torch.get_num_threads()
        num_decodes = batch.num_decodes
        num_seqs = len(batch.query_lens)
        for group, of_group in enumerate(batch.by_group):
            self._decodes[group] = _addresses(of_group, 0, num_decodes)
            self._prompts[group] = _addresses(of_group, num_decodes, num_seqs)
        if self._torch is not None and num_decodes < num_seqs:
            self._torch.begin_step(_without_decodes(batch))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query = self._rows(query)
        key = self._rows(key)
        value = self._rows(value)
        output = torch.empty(query.shape, dtype=self._pool.dtype)
        heads = self._heads
        heads.num_heads = query.shape[1]
        heads.scale = scale
        heads.window = window or 0
        heads.chunk = chunk or 0
        heads.soft_cap = soft_cap or 0.0
        sink_scores = None if sinks is None else sinks.float().contiguous()
        heads.sinks = None if sink_scores is None else sink_scores.data_ptr()
        group, slot, _ = self.places[layer]
        first = self._decodes[group].num_seqs
        if first:
            self._point_to(query, key, value, output, 0)
            self._kernel.attend_decode(self._address, self._decodes[group], slot, heads, self._num_threads)
        if first == len(query):
            return output
        if self._torch is None:
            self._point_to(query, key, value, output, first)
            self._kernel.attend_prefill(self._address, self._prompts[group], slot, heads, self._num_threads)
        else:
            output[first:] = self._torch.attend(
                layer,
                query[first:],
                key[first:],
                value[first:],
                scale=scale,
                window=window,
                chunk=chunk,
                soft_cap=soft_cap,
                sinks=sinks,
            )
        return output

    def attend_latent(
        self,
        layer: int,
        query: torch.Tensor,
        latent: torch.Tensor,
        *,
        value_size: int,
        scale: float,
        choice: LatentChoice | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend. The kernel computes ``LATENT_UNIT`` numbers of values at a time; torch
        attends in sequences whose latents are chosen."""
        assert self._batch is not None, "a step begins first"
        group, slot, _ = self.places[layer]
        of_group = self._batch.by_group[group]
        query = self._rows(query)
        key = self._rows(latent[:, None])
        padded = -(-value_size // LATENT_UNIT) * LATENT_UNIT
        output = torch.empty((*query.shape[:2], padded), dtype=self._pool.dtype)
        heads = self._heads
        heads.num_heads = query.shape[1]
        heads.scale = scale
        heads.value_size = padded
        heads.window = heads.chunk = 0
        heads.soft_cap = 0.0
        heads.sinks = None
        top_k = None if choice is None else choice.top_k
        for start, end, first_token in _spans(of_group, top_k):
            self._point_to(query, key, key, output, first_token)
            sequences = _addresses(of_group, start, end)
            self._kernel.attend_latent(self._address, sequences, slot, heads, self._num_threads)
        if choice is not None and of_group.seq_lens.max() > choice.top_k:
            cache = self._pool[:, slot, 0]
            cache[torch.from_numpy(of_group.slot_blocks), torch.from_numpy(of_group.slot_offsets)] = key
            longer = self._longer_than(group, choice.top_k)
            attend_sequences(
                output, cache, longer, query, choice, self._chosen, value_size=value_size, scale=scale
            )
        return output[..., :value_size]

    def _longer_than(self, group: int, top_k: int) -> list[LatentSequence]:
        """The sequences of a group with more tokens; layers share them."""
        assert self._batch is not None, "a step begins first"
        if group not in self._longer:
            every = latent_sequences(self._batch.by_group[group], self._pool.shape[3], self._pool.device)
            self._longer[group] = [each for each in every if each.seq_len > top_k]
        return self._longer[group]

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [num_tokens, heads, head_dim] in the pool's dtype, each row [heads, head_dim]
        contiguous."""
        if x.dtype == self._pool.dtype and x.stride()[1:] == (x.shape[2], 1):
            return x
        return x.to(self._pool.dtype).contiguous()

    def _point_to(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        first_token: int,
    ) -> None:
        """Point ``_heads`` to the rows of the tensors from ``first_token`` on."""
        heads = self._heads
        size = self._pool.itemsize
        heads.query_stride, heads.key_stride = query.stride(0), key.stride(0)
        heads.value_stride, heads.output_stride = value.stride(0), output.stride(0)
        heads.query = query.data_ptr() + first_token * heads.query_stride * size
        heads.key = key.data_ptr() + first_token * heads.key_stride * size
        heads.value = value.data_ptr() + first_token * heads.value_stride * size
        heads.output = output.data_ptr() + first_token * heads.output_stride * size


def _spans(batch: AttentionBatch, top_k: int | None) -> Iterator[tuple[int, int, int]]:
    """Runs of sequences with at most so many tokens (None: all): the first, the one after the last, and the
    first one's first query token."""
    num_seqs = len(batch.query_lens)
    if top_k is None or batch.seq_lens.max(initial=0) <= top_k:
        yield 0, num_seqs, 0
        return
    first_tokens = np.cumsum(batch.query_lens) - batch.query_lens
    is_short = np.concatenate(([False], batch.seq_lens <= top_k, [False]))
    bounds = np.flatnonzero(is_short[1:] != is_short[:-1]).tolist()
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        yield start, end, int(first_tokens[start])


def _addresses(batch: AttentionBatch, start: int, end: int) -> SequenceAddresses:
    """The addresses of the sequences ``start`` to ``end``; valid as long as the batch exists."""
    arrays = (batch.query_lens, batch.seq_lens, batch.block_tables)
    assert all(array.flags.c_contiguous for array in arrays)
    pointers = (array.ctypes.data + start * array.strides[0] for array in arrays)
    return SequenceAddresses(end - start, batch.block_tables.shape[1], *pointers)


def _without_decodes(batch: AttentionBatch) -> AttentionBatch:
    prompts = tuple(_only_prompts(of_group) for of_group in batch.by_group)
    return replace(prompts[0], other_groups=prompts[1:])


def _only_prompts(batch: AttentionBatch) -> AttentionBatch:
    first = batch.num_decodes
    return AttentionBatch(
        num_decodes=0,
        query_lens=batch.query_lens[first:],
        seq_lens=batch.seq_lens[first:],
        block_tables=batch.block_tables[first:],
        slot_blocks=batch.slot_blocks[first:],
        slot_offsets=batch.slot_offsets[first:],
    )
