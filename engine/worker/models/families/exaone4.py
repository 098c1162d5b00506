"""EXAONE 4: norms of heads, and of the outputs of attention and MLP instead of inputs; where some layers have
windows, the others have no rope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.base import layer_windows
from engine.worker.models.families.plain import plain_shape
from engine.worker.models.shape import NO_ROPE, DecoderShape


def exaone4_shape(config: Any) -> DecoderShape:
    windows = tuple(layer_windows(config))
    kinds = tuple(NO_ROPE if window is None else "" for window in windows)
    return replace(
        plain_shape(config),
        qk_norm=True,
        input_norms=False,
        output_norms=True,
        windows=windows,
        rope_kinds=() if config.sliding_window is None else kinds,
    )
