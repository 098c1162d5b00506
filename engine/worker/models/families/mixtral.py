"""Mixtral: Mistral with a mixture of experts in every layer, and different tensor names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.worker.models.families.mistral import mistral_shape
from engine.worker.models.shape import DecoderShape, ExpertNames, Routing, SparseShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NAMES = ExpertNames("block_sparse_moe.", gate="w1", up="w3", down="w2")


def mixtral_shape(config: PreTrainedConfig) -> DecoderShape:
    plain = mistral_shape(config)
    routing = Routing(config.num_local_experts, config.num_experts_per_tok)
    sparse = SparseShape(config.intermediate_size, routing, names=NAMES)
    return replace(plain, mlps=(sparse,) * plain.num_layers)
