"""Chooses the tokens that a layer with latent attention attends to (DeepSeek Sparse Attention,
arXiv:2512.02556, section 2.1): a small attention whose scores, weighted by head, rank a query's tokens.

Published code rounds its queries and keys to FP8 after a rotation that keeps products; this does neither,
like transformers' code.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import layer_norm, linear

from engine.worker.attention.chosen_latents import IndexQueries
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.rotary import pairs_apart, rotate
from engine.worker.models.shape import LatentShape

_NORM_EPS = 1e-6


class LatentIndexer(nn.Module):
    """The indexer of one layer; every rank has all of it."""

    def __init__(self, hidden_size: int, latent: LatentShape, build: Builder) -> None:
        super().__init__()
        assert latent.index is not None
        assert latent.q_rank is not None
        self._shape = shape = latent.index
        self.query = build.linear(latent.q_rank, shape.num_heads * shape.head_dim, bias=False)
        self.key = build.linear(hidden_size, shape.head_dim, bias=False)
        self.key_norm = build.parameter(shape.head_dim)
        self.key_bias = build.parameter(shape.head_dim)
        self.head_weights = build.parameter(shape.num_heads, hidden_size)

    def keys_of(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> [num_tokens, head_dim]"""
        key = self.key(x)
        normed = layer_norm(key, key.shape[-1:], self.key_norm, self.key_bias, _NORM_EPS)
        return self._rotated(normed[:, None], cos, sin)[:, 0]

    def queries_of(
        self, x: torch.Tensor, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> IndexQueries:
        """x [num_tokens, hidden_size]; q [num_tokens, q_rank]: the latents of the queries"""
        num_heads = self._shape.num_heads
        heads = self.query(q).view(len(q), num_heads, self._shape.head_dim)
        weights = linear(x, self.head_weights).float() * num_heads**-0.5
        return IndexQueries(self._rotated(heads, cos, sin), weights)

    def _rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, heads, head_dim] with its first numbers rotated -> the same shape"""
        pairs = pairs_apart(x, cos.shape[-1]) if self._shape.interleaved else x
        return rotate(pairs, cos, sin)

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        return {
            "wq_b.weight": TensorPart(self.query.weight),
            "wk.weight": TensorPart(self.key.weight),
            "k_norm.weight": TensorPart(self.key_norm),
            "k_norm.bias": TensorPart(self.key_bias),
            "weights_proj.weight": TensorPart(self.head_weights),
        }
