"""Prefill attention over latents in plain torch: gathers a prompt's latents, then attends in tiles of
queries. The host never waits."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.worker.gpu.step_batch import PromptChunk, StepBatch

PACKED_ROWS = 1024
"""Queries times heads that share one mask: limits the mask's size for any context length."""


def attend_latent_prompts(
    output: torch.Tensor,
    query: torch.Tensor,
    latents: torch.Tensor,
    batch: StepBatch,
    scale: float,
    kv_scale: float,
) -> None:
    """Attention of ``batch.prompts``; it leaves earlier rows of output and query alone. ``kv_scale``: of
    8-bit latents.

    output [num_tokens, num_heads, value_size]; query [num_tokens, num_heads, latent_size]; latents
    [num_blocks, block_size, 1, latent_size], the new ones included
    """
    for chunk in batch.prompts:
        part = slice(chunk.first_token, chunk.first_token + chunk.query_len)
        gathered = _gathered(latents, batch, chunk)
        if gathered.dtype != query.dtype:
            gathered = (gathered.float() * kv_scale).to(query.dtype)
        _attend_chunk(output[part], query[part], gathered, scale)


def _gathered(latents: torch.Tensor, batch: StepBatch, chunk: PromptChunk) -> torch.Tensor:
    """The latents of a sequence [seq_len, latent_size]"""
    num_blocks = -(-chunk.seq_len // latents.shape[1])
    table = batch.block_tables.index_select(0, batch.rows[chunk.seq : chunk.seq + 1])
    return latents[table[0, :num_blocks].long()].flatten(0, 2)[: chunk.seq_len]


def _attend_chunk(output: torch.Tensor, query: torch.Tensor, latents: torch.Tensor, scale: float) -> None:
    """Attend in tiles, each over the latents that its last query sees."""
    num_queries, num_heads, _ = query.shape
    context = len(latents) - num_queries
    tile_size = max(1, PACKED_ROWS // num_heads)
    positions = torch.arange(len(latents), device=query.device)
    for start in range(0, num_queries, tile_size):
        end = min(start + tile_size, num_queries)
        keys = latents[: context + end]
        seen = positions[: context + end] <= positions[context + start : context + end, None]
        attended = scaled_dot_product_attention(
            query[start:end].flatten(0, 1)[None, None],
            keys[None, None],
            keys[None, None, :, : output.shape[2]],
            attn_mask=seen.repeat_interleave(num_heads, dim=0),
            scale=scale,
        )
        output[start:end] = attended[0, 0].view(end - start, num_heads, -1)
