"""Attention over a step on the device, sequence by sequence in plain torch, for tests of what runs steps."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.worker.attention.backend import AttentionBatch
from engine.worker.gpu.step_batch import StepBatch


class TorchStepAttention:
    """A DeviceAttention over a pool [num_blocks, num_slots, 2, block_size, num_kv_heads, head_dim]."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool
        self._block_size = pool.shape[3]
        self._step: StepBatch | None = None

    def begin_step(self, batch: AttentionBatch) -> None:
        raise NotImplementedError("steps of these tests lie on the device")

    def begin_device_step(self, batch: StepBatch) -> None:
        self._step = batch

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert soft_cap is None
        assert sinks is None
        step = self._step
        assert step is not None
        kept = step.slots >= 0
        blocks, offsets = step.slots[kept] // self._block_size, step.slots[kept] % self._block_size
        for which, new in enumerate((key, value)):
            self._pool[blocks, layer, which, offsets] = new[kept]
        output = torch.full_like(query, torch.nan)  # of places that nobody took
        starts = step.query_starts.tolist()
        for seq, (row, seq_len) in enumerate(zip(step.rows.tolist(), step.seq_lens.tolist(), strict=True)):
            if seq_len:
                part = slice(starts[seq], starts[seq + 1])
                output[part] = self._attend_one(layer, query[part], row, seq_len, scale, window)
        return output

    def _attend_one(
        self, layer: int, query: torch.Tensor, row: int, seq_len: int, scale: float, window: int | None
    ) -> torch.Tensor:
        """query [query_len, heads, head_dim] -> like it"""
        assert self._step is not None
        blocks = self._step.block_tables[row, : -(-seq_len // self._block_size)].long()
        keys, values = (self._pool[blocks, layer, which].flatten(0, 1)[:seq_len] for which in (0, 1))
        places = torch.arange(seq_len)
        queries = places[seq_len - len(query) :, None]
        seen = places <= queries
        if window is not None:
            seen &= places > queries - window
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=seen,
            scale=scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)
