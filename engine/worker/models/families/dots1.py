"""dots.llm1: Qwen3's attention with windows in some layers, DeepSeek-V3's mixture of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.glm4_moe import sigmoid_experts
from engine.worker.models.families.qwen3 import qwen3_shape
from engine.worker.models.shape import DecoderShape


def dots1_shape(config: Any) -> DecoderShape:
    plain = qwen3_shape(config)
    sparse = sigmoid_experts(config)
    first = config.first_k_dense_replace or 0
    mlps = (mlp if index < first else sparse for index, mlp in enumerate(plain.mlps))
    return replace(plain, mlps=tuple(mlps))
