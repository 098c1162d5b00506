"""Gemma 3 (text): Gemma 2 with head norms in place of its cap of scores, and a separate rope for layers with
a window (arXiv:2503.19786)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.gemma2 import gemma2_shape
from engine.worker.models.rotary import all_ropes
from engine.worker.models.shape import DecoderShape


def gemma3_shape(config: Any) -> DecoderShape:
    ropes = all_ropes(config)
    kinds = () if "" in ropes else tuple(config.layer_types)
    # Its code reads attn_logit_softcapping, but does not apply it.
    return replace(gemma2_shape(config), qk_norm=True, attention_cap=None, rope_kinds=kinds)
