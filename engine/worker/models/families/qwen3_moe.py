"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-Coder): Qwen3 with a mixture of experts in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.worker.models.families.qwen3 import qwen3_shape
from engine.worker.models.shape import DecoderShape, Routing, SparseShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def qwen3_moe_shape(config: PreTrainedConfig) -> DecoderShape:
    plain = qwen3_shape(config)
    routing = Routing(
        config.num_experts,
        config.num_experts_per_tok,
        normalized=bool(config.norm_topk_prob),
        rounded=True,
    )
    sparse = SparseShape(config.moe_intermediate_size, routing)
    mlps = (sparse if _is_sparse(config, index) else mlp for index, mlp in enumerate(plain.mlps))
    return replace(plain, mlps=tuple(mlps))


def _is_sparse(config: Any, index: int) -> bool:
    return index not in (config.mlp_only_layers or ()) and (index + 1) % config.decoder_sparse_step == 0
