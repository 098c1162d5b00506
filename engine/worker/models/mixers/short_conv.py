"""LFM2's gated short convolution, which replaces attention in most of its layers: each channel is convolved
over a few tokens, between two gates."""

from __future__ import annotations

import torch

from engine.worker.attention.backend import AttentionBackend
from engine.worker.loading.tensor_part import Section, SectionedPart, TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.mixers.state_layers import StateLayer
from engine.worker.models.mixers.state_shapes import ShortConvShape
from engine.worker.models.shape import DecoderShape
from engine.worker.states.operations import Convolution


class ShortConv(StateLayer):
    """The convolution of one layer, or a rank's channels of it."""

    checkpoint_prefix = "conv."

    def __init__(self, shape: DecoderShape, conv: ShortConvShape, build: Builder) -> None:
        """``conv``: the shape of this rank's part."""
        super().__init__()
        self._group = build.group
        self._num_channels = conv.num_channels
        self.projection = build.linear(shape.hidden_size, 3 * conv.num_channels, conv.bias)
        """The linear that computes the gates before and after the convolution, and its channels."""
        self.conv = build.parameter(conv.num_channels, 1, conv.conv_width)
        self.conv_bias = build.parameter(conv.num_channels) if conv.bias else None
        self.output = build.row_parallel(conv.num_channels, shape.hidden_size, conv.bias)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        before, after, channels = self.projection(x).chunk(3, dim=-1)
        convolution = Convolution(before * channels, self.conv.squeeze(1), self.conv_bias)
        output: torch.Tensor = self.output(after * self.states.causal_conv(convolution))
        return output

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        rank = self._group.rank
        size = self._group.size
        channels = (Section(self._num_channels, rank, size),) * 3
        parts: dict[str, TensorPart] = {
            f"in_proj.{kind}": SectionedPart.of(each, channels)
            for kind, each in self.projection.named_parameters()
        }
        parts["conv.weight"] = TensorPart(self.conv, 0, rank, size)
        if self.conv_bias is not None:
            parts["conv.bias"] = TensorPart(self.conv_bias, 0, rank, size)
        parts["out_proj.weight"] = TensorPart(self.output.weight, 1, rank, size)
        if self.output.bias is not None:
            parts["out_proj.bias"] = TensorPart(self.output.bias)
        return parts
