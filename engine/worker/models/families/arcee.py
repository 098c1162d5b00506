"""Arcee's AFM: Llama with a square in place of a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.llama import llama_shape
from engine.worker.models.shape import DecoderShape, DenseShape


def is_known_arcee(config: Any) -> bool:
    return bool(config.hidden_act == "relu2")


def arcee_shape(config: Any) -> DecoderShape:
    mlp = DenseShape(config.intermediate_size, bias=bool(config.mlp_bias), squared=True)
    return replace(llama_shape(config), mlps=(mlp,) * config.num_hidden_layers)
