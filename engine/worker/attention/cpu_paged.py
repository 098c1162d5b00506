"""Paged attention on a CPU by the compiled kernel; prompts in torch where the CPU is too old for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.worker.attention.backend import AttentionBatch
from engine.worker.attention.cpu_kernel import CpuKernel, HeadAddresses, PoolAddress, SequenceAddresses
from engine.worker.attention.torch_paged import TorchPagedAttention

_Run = Callable[[PoolAddress, SequenceAddresses, int, HeadAddresses, int], None]


class CpuPagedAttention:
    """An AttentionBackend over a pool [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].

    What the kernel gives a sequence does not depend on the others of its step, to the last bit.
    """

    def __init__(self, pool: torch.Tensor, kernel: CpuKernel) -> None:
        """``kernel``: loaded for the pool's head_dim and type."""
        assert pool.is_contiguous()
        self._pool = pool
        self._kernel = kernel
        self._torch = None if kernel.knows_prompts else TorchPagedAttention(pool)
        self._address = PoolAddress(
            pool.data_ptr(), pool.stride(0), pool.stride(1), pool.stride(2), pool.stride(3), *pool.shape[3:5]
        )
        self._heads = HeadAddresses()
        self._batch: AttentionBatch | None = None
        """Held for the arrays that the addresses point to."""
        self._decodes = self._prompts = SequenceAddresses()
        self._num_threads = 1

    def begin_step(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._num_threads = torch.get_num_threads()
        self._decodes = _addresses(batch, 0, batch.num_decodes)
        self._prompts = _addresses(batch, batch.num_decodes, len(batch.query_lens))
        if self._torch is not None and self._prompts.num_seqs:
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
    ) -> torch.Tensor:
        output = torch.empty(query.shape, dtype=self._pool.dtype)
        heads = self._heads
        heads.num_heads, heads.window, heads.scale = query.shape[1], window or 0, scale
        decodes, prompts = slice(0, self._decodes.num_seqs), slice(self._decodes.num_seqs, len(query))
        if self._decodes.num_seqs:
            self._run(
                self._kernel.attend_decodes,
                self._decodes,
                layer,
                (query[decodes], key[decodes], value[decodes], output[decodes]),
            )
        if self._torch is not None and self._prompts.num_seqs:
            output[prompts] = self._torch.attend(
                layer, query[prompts], key[prompts], value[prompts], scale=scale, window=window
            )
        elif self._prompts.num_seqs:
            self._run(
                self._kernel.attend_prompts,
                self._prompts,
                layer,
                (query[prompts], key[prompts], value[prompts], output[prompts]),
            )
        return output

    def _run(
        self,
        function: _Run,
        sequences: SequenceAddresses,
        layer: int,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """``tensors``: query, key, value, output of these sequences, [num_tokens, heads, head_dim]."""
        query, key, value = (self._rows(x) for x in tensors[:3])
        output, heads = tensors[3], self._heads
        heads.query, heads.query_stride = query.data_ptr(), query.stride(0)
        heads.key, heads.key_stride = key.data_ptr(), key.stride(0)
        heads.value, heads.value_stride = value.data_ptr(), value.stride(0)
        heads.output, heads.output_stride = output.data_ptr(), output.stride(0)
        function(self._address, sequences, layer, heads, self._num_threads)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, heads, head_dim], each row [heads, head_dim] without gaps."""
        x = x.to(self._pool.dtype)
        return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _addresses(batch: AttentionBatch, start: int, end: int) -> SequenceAddresses:
    """Of the sequences ``start`` to ``end``; valid while the batch is."""
    arrays = (batch.query_lens, batch.seq_lens, batch.block_tables)
    assert all(array.flags.c_contiguous for array in arrays)
    pointers = (array.ctypes.data + start * array.strides[0] for array in arrays)
    return SequenceAddresses(end - start, batch.block_tables.shape[1], *pointers)


def _without_decodes(batch: AttentionBatch) -> AttentionBatch:
    first = batch.num_decodes
    return AttentionBatch(
        num_decodes=0,
        query_lens=batch.query_lens[first:],
        seq_lens=batch.seq_lens[first:],
        block_tables=batch.block_tables[first:],
        slot_blocks=batch.slot_blocks[first:],
        slot_offsets=batch.slot_offsets[first:],
    )
