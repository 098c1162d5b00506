"""K-EXAONE: EXAONE 4's attention, with norms of inputs, and DeepSeek-V3's experts where the config says so.
The layers for multi-token prediction are not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.exaone4 import exaone4_shape
from engine.worker.models.families.glm4_moe import sigmoid_routing
from engine.worker.models.families.plain import mlps_by_kind
from engine.worker.models.shape import DecoderShape, SparseShape

_NAMES = (("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),)


def exaone_moe_shape(config: Any) -> DecoderShape:
    plain = exaone4_shape(config)
    size = config.moe_intermediate_size
    routing = sigmoid_routing(config, config.num_experts)
    sparse = SparseShape(size, routing, size * config.num_shared_experts)
    return replace(
        plain,
        input_norms=True,
        output_norms=False,
        mlps=mlps_by_kind(config, plain.mlps, sparse),
        other_names=_NAMES,
    )
