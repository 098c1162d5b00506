"""Attention over a step on the device, sequence by sequence in plain torch, for tests of step execution."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.worker.attention.backend import AttentionBatch
from engine.worker.attention.chosen_latents import LatentChoice
from engine.worker.attention.layer_places import LayerPlaces, one_table
from engine.worker.gpu.step_batch import StepBatch


class TorchStepAttention:
    """A DeviceAttention over a pool [num_blocks, num_slots, 1 or 2, block_size, num_kv_heads, head_dim]."""

    def __init__(self, pool: torch.Tensor, places: LayerPlaces | None = None) -> None:
        self._pool = pool
        self._places = one_table(pool.shape[1]) if places is None else places
        self._block_size = pool.shape[3]
        self._steps: tuple[StepBatch, ...] = ()

    def begin_step(self, batch: AttentionBatch) -> None:
        raise NotImplementedError("steps of these tests lie on the device")

    def begin_device_step(self, batch: StepBatch) -> None:
        self._steps = batch.by_group

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
        assert soft_cap is None
        assert chunk is None
        assert sinks is None
        group, slot, _ = self._places[layer]
        step = self._steps[group]
        kept = step.slots >= 0
        blocks, offsets = step.slots[kept] // self._block_size, step.slots[kept] % self._block_size
        for which, new in ((0, key), (-1, value)):
            self._pool[blocks, slot, which, offsets] = new[kept]
        output = torch.full_like(query, torch.nan)  # for places without a sequence
        starts = step.query_starts.tolist()
        for seq, (row, seq_len) in enumerate(zip(step.rows.tolist(), step.seq_lens.tolist(), strict=True)):
            if seq_len:
                part = slice(starts[seq], starts[seq + 1])
                table = step.block_tables[row]
                output[part] = self._attend_one(slot, query[part], table, seq_len, scale, window)
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
        assert choice is None
        heads = latent[:, None]
        return self.attend(layer, query, heads, heads, scale=scale, window=None)[..., :value_size]

    def _attend_one(
        self,
        slot: int,
        query: torch.Tensor,
        table: torch.Tensor,
        seq_len: int,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """query [query_len, heads, head_dim] -> like it"""
        blocks = table[: -(-seq_len // self._block_size)].long()
        keys, values = (self._pool[blocks, slot, which].flatten(0, 1)[:seq_len] for which in (0, -1))
        places = torch.arange(seq_len)
        queries = places[seq_len - len(query) :, None]
        seen = places <= queries
        if window is not None:
            seen &= places > queries - window
            hidden = max(0, seq_len - len(query) - window + 1)
            keys[:hidden] = values[:hidden] = 0  # now another sequence's
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=seen,
            scale=scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)
