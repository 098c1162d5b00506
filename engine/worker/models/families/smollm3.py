"""SmolLM3: Llama without rope in some layers, and with windows in others if the config uses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.base import layer_windows
from engine.worker.models.families.llama import llama_shape
from engine.worker.models.shape import NO_ROPE, DecoderShape


def smollm3_shape(config: Any) -> DecoderShape:
    have_rope = config.no_rope_layers[: config.num_hidden_layers]  # it names those that have one
    kinds = tuple("" if has_rope else NO_ROPE for has_rope in have_rope)
    return replace(llama_shape(config), windows=tuple(layer_windows(config)), rope_kinds=kinds)
