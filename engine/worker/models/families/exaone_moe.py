"""K-EXAONE: EXAONE 4's attention, with norms of inputs, and DeepSeek-V3's experts where the config says so.
The layers for multi-token prediction are not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.exaone4 import exaone4_shape
from engine.worker.models.families.plain import mlps_by_kind
from engine.worker.models.shape import DecoderShape, Routing, SparseShape

_NAMES = (("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),)


def exaone_moe_shape(config: Any) -> DecoderShape:
    plain = exaone4_shape(config)
    size = config.moe_intermediate_size
    routing = Routing(
        config.num_experts,
        config.num_experts_per_tok,
        normalized=bool(config.norm_topk_prob),
        by_sigmoid=True,
        num_groups=config.n_group,
        num_top_groups=config.topk_group,
        scale=config.routed_scaling_factor,
    )
    sparse = SparseShape(size, routing, size * config.num_shared_experts)
    return replace(
        plain,
        input_norms=True,
        output_norms=False,
        mlps=mlps_by_kind(config, plain.mlps, sparse),
        other_names=_NAMES,
    )
