"""Seed-OSS: Llama with separate switches for the biases of attention's inputs and output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.llama import llama_shape
from engine.worker.models.shape import DecoderShape


def seed_oss_shape(config: Any) -> DecoderShape:
    return replace(llama_shape(config), output_bias=bool(config.attention_out_bias))
