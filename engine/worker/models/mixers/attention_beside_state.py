"""Attention and a state in one layer, which read the same input and whose outputs are added (Falcon-H1,
arXiv:2507.22448, section 2.1)."""

from __future__ import annotations

import torch
from torch import nn

from engine.worker.attention.backend import AttentionBackend
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.mixers.attention import SelfAttention
from engine.worker.models.mixers.mamba2 import Mamba2
from engine.worker.models.mixers.state_shapes import MambaShape
from engine.worker.models.shape import BesideShape, DecoderShape


class AttentionBesideState(nn.Module):
    """The attention and the Mamba-2 of one layer, or a rank's heads of both."""

    checkpoint_prefix = ""

    def __init__(
        self, shape: DecoderShape, beside: BesideShape, mamba: MambaShape, index: int, build: Builder
    ) -> None:
        """``index``: the layer's number. ``mamba``: the shape of this rank's part."""
        super().__init__()
        self._beside = beside
        self.attention = SelfAttention(shape, index, build)
        self.mamba = Mamba2(shape, mamba, build)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        scales = self._beside
        attended = self.attention(x * scales.attention_input, cos, sin, attention)
        scanned = self.mamba(x * scales.state_input, cos, sin, attention)
        output: torch.Tensor = scanned * scales.state_output + attended * scales.attention_output
        return output

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        attention = {f"self_attn.{name}": part for name, part in self.attention.checkpoint_parts().items()}
        mamba = {f"mamba.{name}": part for name, part in self.mamba.checkpoint_parts().items()}
        return attention | mamba
