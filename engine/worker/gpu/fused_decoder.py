"""A decoder with fused elementwise ops between its GEMMs, which also write K and V to their pages.

No call makes the host wait and no shape depends on data, so a CUDA graph can capture a whole step. Sizes are
those of the given decoder, which may be a tensor-parallel shard.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import nn

from engine.worker.attention.backend import AttentionBackend
from engine.worker.gpu.kv_write import HeadNorms, KVWrite
from engine.worker.gpu.ops import FusedOps
from engine.worker.gpu.paged_kv import PagedKv
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from engine.worker.models.layer import DecoderLayer
from engine.worker.models.linears import Embedding
from engine.worker.models.mixers.attention import SelfAttention
from engine.worker.models.mlp import GatedMLP
from engine.worker.models.moe import Experts, MixtureOfExperts
from engine.worker.models.rotary import RotaryEmbedding


def with_fused_steps(
    model: CausalModel, attention: PagedKv, ops: FusedOps, max_positions: int
) -> CausalModel:
    """``model`` with fused ops if they support all of it. All positions are below ``max_positions``."""
    return FusedDecoder(model, attention, ops, max_positions) if can_be_fused(model) else model


def can_be_fused(model: CausalModel) -> TypeGuard[Decoder]:
    """Whether fused ops support all that this model computes: their rope rotates whole heads."""
    return isinstance(model, Decoder) and not model.shape.rotary_dim and model.shape.is_plain


class FusedDecoder:
    """A CausalModel for one attention backend."""

    def __init__(self, model: Decoder, attention: PagedKv, ops: FusedOps, max_positions: int) -> None:
        """Shares the weights of ``model``."""
        self.num_layers = model.num_layers
        self.num_kv_heads = model.num_kv_heads
        self.head_dim = model.head_dim
        self.num_kv_vectors = model.num_kv_vectors
        self.windows = model.windows
        self.chunks = model.chunks
        self._plain = model
        self._attention = attention
        self._ops = ops
        self._norms = [_head_norms(layer, model.shape.norm_eps) for layer in model.layers]
        self._cos_sin = angle_table(model.rotary, max_positions, model.final_norm.dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_rows: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See CausalModel.forward."""
        if attention is not self._attention or self._plain.media is not None:
            return self._plain.forward(input_ids, positions, sample_rows, attention)
        eps = self._plain.shape.norm_eps
        x = self._plain.stage_input(input_ids)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self._plain.layers):
            assert isinstance(layer, DecoderLayer)
            assert isinstance(layer.attention, SelfAttention)
            assert layer.input_norm is not None
            assert layer.post_attention_norm is not None
            normed, residual = self._ops.rms_norm(x, layer.input_norm, eps, residual)
            attended = self._attend(index, self._linear(layer.attention.qkv, normed), positions)
            normed, residual = self._ops.rms_norm(
                self._linear(layer.attention.output, attended), layer.post_attention_norm, eps, residual
            )
            if isinstance(layer.mlp, GatedMLP):
                x = self._linear(layer.mlp.down, self._opened(layer.mlp.gate_up, normed))
            else:
                assert isinstance(layer.mlp, MixtureOfExperts)
                x = self._mix(layer.mlp, normed)
        assert residual is not None, "a decoder has layers"
        if not self._plain.is_last:
            return self._plain.send_to_next(x + residual, sample_rows)
        normed, _ = self._ops.rms_norm(x[sample_rows], self._plain.final_norm, eps, residual[sample_rows])
        return self._head(normed)

    def _linear(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1 and type(module) is nn.Linear:
            return self._ops.linear_of_row(x, module.weight, module.bias)
        output: torch.Tensor = module(x)
        return output

    def _opened(self, gate_up: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1 and type(gate_up) is nn.Linear:
            return self._ops.swiglu_of_row(x, gate_up.weight, gate_up.bias)
        return self._ops.swiglu(gate_up(x))

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        head = self._plain.embedding if self._plain.lm_head is None else self._plain.lm_head
        if len(x) == 1 and isinstance(head, nn.Linear | Embedding):
            return self._ops.linear_of_row(x, head.weight, None)
        return self._plain.head(x)

    def _mix(self, mlp: MixtureOfExperts, normed: torch.Tensor) -> torch.Tensor:
        experts = mlp.experts
        assert isinstance(experts, Experts), "they are packed on CPUs only"
        return mlp.mixed_by(lambda rows, *chosen: self._ops.mix_experts(rows, experts, *chosen), normed)

    def _attend(self, index: int, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """qkv [num_tokens, query_size + 2 * kv_size] -> [num_tokens, query_size]"""
        shape = self._plain.shape
        attention = self._attention
        write = KVWrite(*attention.pages(index), attention.slots_of(index), attention.kv_scale)
        query = self._ops.rope_and_write(qkv, self._cos_sin, positions, write, self._norms[index])
        attended = attention.attend_written(
            index, query, scale=shape.head_dim**-0.5, window=shape.windows[index], chunk=self.chunks[index]
        )
        return attended.flatten(1)


def _head_norms(layer: nn.Module, eps: float) -> HeadNorms | None:
    assert isinstance(layer, DecoderLayer)
    attention = layer.attention
    assert isinstance(attention, SelfAttention)
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return HeadNorms(attention.q_norm, attention.k_norm, eps)


def angle_table(rotary: RotaryEmbedding, num_positions: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_positions, head_dim]: the cosines, then the sines, of each position's angles; rounded as
    ``RotaryEmbedding.angles`` rounds them."""
    positions = torch.arange(num_positions, device=rotary.frequencies.device)
    cos, sin = rotary.angles(positions, dtype)
    half = len(rotary.frequencies)
    return torch.cat((cos[:, 0, :half], sin[:, 0, half:]), dim=-1)
