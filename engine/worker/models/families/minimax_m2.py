"""MiniMax-M2: norms of all queries and of all keys, rope on a part of each head, and experts with a sigmoid
router in every layer, under Mixtral's names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.mixtral import NAMES
from engine.worker.models.families.plain import plain_shape
from engine.worker.models.rotary import rope_parameters
from engine.worker.models.shape import DecoderShape, Routing, SparseShape

_CORRECTION = "e_score_correction_bias"


def minimax_m2_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    routing = Routing(config.num_local_experts, config.num_experts_per_tok, by_sigmoid=True)
    sparse = SparseShape(config.intermediate_size, routing, names=NAMES)
    share = rope_parameters(config).get("partial_rotary_factor", 1.0)
    return replace(
        plain,
        qk_norm=True,
        norms_all_heads=True,
        rotary_dim=int(plain.head_dim * share),
        mlps=(sparse,) * plain.num_layers,
        other_names=((f"block_sparse_moe.gate.{_CORRECTION}", f"block_sparse_moe.{_CORRECTION}"),),
    )
