"""Self-attention of a decoder that uses rope in only some of its layers, as Llama 4 does: the others have no
positions, and so also work in contexts longer than any in training."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm

from engine.worker.models.builder import Builder
from engine.worker.models.mixers.attention import SelfAttention
from engine.worker.models.rotary import grown, pairs_apart, rotate
from engine.worker.models.shape import NO_ROPE, DecoderShape, MixedRope, QueryGrowth


class MixedRopeAttention(SelfAttention):
    """The attention of one layer, or a rank's heads of it."""

    def __init__(self, shape: DecoderShape, mixed: MixedRope, index: int, build: Builder) -> None:
        """``index``: the layer's number."""
        super().__init__(shape, index, build)
        self._is_rotated = shape.rope_kinds[index] != NO_ROPE
        self._unit_heads = mixed.unit_heads

    def _positioned(self, qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See SelfAttention. In layers without rope, ``cos`` holds the factors of ``QueryFactors``; in the
        others, the pairs that are rotated are neighbors."""
        if not self._is_rotated:
            q = qk[:, : self.shape.num_heads]
            k = qk[:, self.shape.num_heads :]
            return torch.cat(((q * cos).to(qk.dtype), k), dim=1)
        rotated = rotate(pairs_apart(qk, cos.shape[-1]).float(), cos, sin).to(qk.dtype)
        if not self._unit_heads:
            return rotated
        return rms_norm(rotated.float(), rotated.shape[-1:], eps=self.shape.norm_eps).to(qk.dtype)


class QueryFactors:
    """Replaces the angles of a rope by factors of queries at each position (a form of arXiv:2501.19399 that
    grows in steps). Positions count from 1 here."""

    def __init__(self, growth: QueryGrowth) -> None:
        self._growth = growth

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [num_tokens] -> the factors [num_tokens, 1, 1], twice"""
        factors = grown(positions + 1, self._growth).to(dtype)
        return factors, factors
