"""Self-attention of a decoder that tells positions by rope in some of its layers only, as Llama 4 does: the
others are without, and so do as well behind contexts longer than any they were trained on."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm

from engine.worker.models.attention import SelfAttention
from engine.worker.models.builder import Builder
from engine.worker.models.rotary import rotate
from engine.worker.models.shape import NO_ROPE, DecoderShape, MixedRope


class MixedRopeAttention(SelfAttention):
    """The attention of one layer, or a rank's heads of it."""

    def __init__(self, shape: DecoderShape, mixed: MixedRope, index: int, build: Builder) -> None:
        """``index``: the layer's number."""
        super().__init__(shape, index, build)
        self._is_rotated, self._unit_heads = shape.rope_kinds[index] != NO_ROPE, mixed.unit_heads

    def _positioned(self, qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See SelfAttention. Where nothing is rotated ``cos`` is what ``QueryFactors`` has.

        The pairs that are rotated are neighbors. Their first numbers come first afterwards, in queries and
        keys alike, which changes no product of the two.
        """
        if not self._is_rotated:
            q, k = qk[:, : self.shape.num_heads], qk[:, self.shape.num_heads :]
            return torch.cat(((q * cos).to(qk.dtype), k), dim=1)
        pairs = torch.cat((qk[..., ::2], qk[..., 1::2]), dim=-1).float()
        rotated = rotate(pairs, cos, sin).to(qk.dtype)
        if not self._unit_heads:
            return rotated
        return rms_norm(rotated.float(), rotated.shape[-1:], eps=self.shape.norm_eps).to(qk.dtype)


class QueryFactors:
    """In place of the angles of a rope: what queries are multiplied by, at each position (arXiv:2501.19399,
    of which this is a form that grows in steps)."""

    def __init__(self, mixed: MixedRope) -> None:
        self._mixed = mixed

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [num_tokens] -> the factors [num_tokens, 1, 1], twice"""
        steps = torch.floor((positions[:, None, None].float() + 1.0) / self._mixed.interval)
        factors = (1.0 + self._mixed.growth * torch.log1p(steps)).to(dtype)
        return factors, factors
