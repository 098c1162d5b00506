"""A decoder's Mamba layer (arXiv:2312.00752, section 3) with norms of time steps, B and C, as in Jamba
(arXiv:2403.19887)."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, rms_norm

from engine.worker.attention.backend import AttentionBackend
from engine.worker.loading.tensor_part import Section, SectionedPart, TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.mixers.state_layers import StateLayer, gated
from engine.worker.models.mixers.state_shapes import Mamba1Shape
from engine.worker.models.shape import DecoderShape
from engine.worker.states.operations import ChannelScan, Convolution


class Mamba1(StateLayer):
    """The Mamba of one layer, or a rank's channels of it."""

    checkpoint_prefix = "mamba."

    def __init__(self, shape: DecoderShape, mamba: Mamba1Shape, build: Builder) -> None:
        """``mamba``: the shape of this rank's part."""
        super().__init__()
        self._mamba = mamba
        self._group = build.group
        self._eps = shape.norm_eps
        hidden = shape.hidden_size
        channels = mamba.num_channels
        self.projection = build.linear(hidden, 2 * channels, mamba.bias)
        """The linear that computes the convolution's channels and gates."""
        self.conv = build.parameter(channels, 1, mamba.conv_width)
        self.conv_bias = build.parameter(channels) if mamba.conv_bias else None
        self.selection = build.row_parallel(channels, mamba.step_rank + 2 * mamba.state_size, bias=False)
        """The linear that computes B, C and the numbers from which time steps are; every rank has all."""
        # No linear, which would be packed or quantized: its bias is added in fp32, by the scan.
        self.steps = build.parameter(channels, mamba.step_rank)
        self.step_bias = build.parameter(channels)
        self.a_log = build.parameter(channels, mamba.state_size, dtype=torch.float32)
        self.d = build.parameter(channels, dtype=torch.float32)
        self.step_norm = build.parameter(mamba.step_rank)
        self.b_norm = build.parameter(mamba.state_size)
        self.c_norm = build.parameter(mamba.state_size)
        self.output = build.row_parallel(channels, hidden, mamba.bias)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        mixed, gate = self.projection(x).chunk(2, dim=-1)
        convolved = self.states.causal_conv(
            Convolution(mixed, self.conv.squeeze(1), self.conv_bias, has_silu=True)
        )
        scanned = self._scanned(convolved) + convolved.float() * self.d
        output: torch.Tensor = self.output(gated(scanned, gate).to(x.dtype))
        return output

    def _scanned(self, x: torch.Tensor) -> torch.Tensor:
        """What is read from the states: x [num_tokens, num_channels] -> the same shape, in fp32"""
        mamba = self._mamba
        size = mamba.state_size
        steps, b, c = torch.split(self.selection(x), [mamba.step_rank, size, size], dim=-1)
        scan = ChannelScan(
            x=x,
            dt=linear(self._normed(steps, self.step_norm), self.steps),
            b=self._normed(b, self.b_norm),
            c=self._normed(c, self.c_norm),
            a=-self.a_log.exp(),
            dt_bias=self.step_bias,
        )
        return self.states.channel_scan(scan)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * rms_norm(x.float(), (x.shape[-1],), eps=self._eps).to(x.dtype)

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        place = self._group.rank, self._group.size
        halves = (Section(self._mamba.num_channels, *place),) * 2
        parts: dict[str, TensorPart] = {
            f"in_proj.{kind}": SectionedPart.of(each, halves)
            for kind, each in self.projection.named_parameters()
        }
        parts |= {
            "conv1d.weight": TensorPart(self.conv, 0, *place),
            "x_proj.weight": TensorPart(self.selection.weight, 1, *place),
            "dt_proj.weight": TensorPart(self.steps, 0, *place),
            "dt_proj.bias": TensorPart(self.step_bias, 0, *place),
            "A_log": TensorPart(self.a_log, 0, *place),
            "D": TensorPart(self.d, 0, *place),
            "dt_layernorm.weight": TensorPart(self.step_norm),
            "b_layernorm.weight": TensorPart(self.b_norm),
            "c_layernorm.weight": TensorPart(self.c_norm),
            "out_proj.weight": TensorPart(self.output.weight, 1, *place),
        }
        if self.conv_bias is not None:
            parts["conv1d.bias"] = TensorPart(self.conv_bias, 0, *place)
        if self.output.bias is not None:
            parts["out_proj.bias"] = TensorPart(self.output.bias)
        return parts
