"""Mistral: one window for all layers, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.worker.models.base import layer_windows
from engine.worker.models.families.plain import plain_shape
from engine.worker.models.shape import DecoderShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def mistral_shape(config: PreTrainedConfig) -> DecoderShape:
    return replace(plain_shape(config), windows=tuple(layer_windows(config)))
