"""A decoder's Mamba-2 layer (arXiv:2405.21060, section 7), which replaces attention in hybrid models."""

from __future__ import annotations

import torch

from engine.worker.attention.backend import AttentionBackend
from engine.worker.loading.tensor_part import Section, SectionedPart, TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.mixers.state_layers import StateLayer, gated
from engine.worker.models.mixers.state_shapes import MambaShape
from engine.worker.models.shape import DecoderShape
from engine.worker.states.operations import Convolution, Scan


class Mamba2(StateLayer):
    """The Mamba-2 of one layer, or a rank's heads of it."""

    checkpoint_prefix = "mamba."

    def __init__(self, shape: DecoderShape, mamba: MambaShape, build: Builder) -> None:
        """``mamba``: the shape of this rank's part."""
        super().__init__()
        self._mamba = mamba
        self._group = build.group
        self._eps = shape.norm_eps
        hidden = shape.hidden_size
        inner = mamba.inner_size
        self.projection = build.linear(hidden, inner + mamba.conv_size + mamba.num_heads, mamba.bias)
        """The linear that computes gates, the convolution's channels and time steps."""
        self.conv = build.parameter(mamba.conv_size, 1, mamba.conv_width)
        self.conv_bias = build.parameter(mamba.conv_size) if mamba.conv_bias else None
        self.dt_bias = build.parameter(mamba.num_heads, dtype=torch.float32)
        self.a_log = build.parameter(mamba.num_heads, dtype=torch.float32)
        self.d = build.parameter(mamba.num_heads, dtype=torch.float32)
        self.norm = build.parameter(inner) if mamba.has_norm else None
        self.output = build.row_parallel(inner, hidden, mamba.bias)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        mamba = self._mamba
        states = self.states
        sizes = [mamba.inner_size, mamba.conv_size, mamba.num_heads]
        gate, mixed, dt = torch.split(self._projected(x), sizes, dim=-1)
        convolved = states.causal_conv(
            Convolution(mixed, self.conv.squeeze(1), self.conv_bias, has_silu=True)
        )
        heads, b, c = torch.split(convolved, [mamba.inner_size, mamba.groups_size, mamba.groups_size], dim=-1)
        scan = Scan(
            x=heads.view(len(x), mamba.num_heads, mamba.head_size),
            dt=dt,
            b=b.view(len(x), mamba.num_groups, mamba.state_size),
            c=c.view(len(x), mamba.num_groups, mamba.state_size),
            a=-self.a_log.exp(),
            d=self.d,
            dt_bias=self.dt_bias,
        )
        scanned = states.selective_scan(scan)
        opened = gated(scanned.flatten(1), gate)
        normed = opened.to(x.dtype) if self.norm is None else self.norm * self._normed(opened).to(x.dtype)
        output: torch.Tensor = self.output(normed)
        return output

    def _projected(self, x: torch.Tensor) -> torch.Tensor:
        """Gates, the convolution's channels and time steps, each with its factor."""
        mamba = self._mamba
        projected: torch.Tensor = self.projection(x)
        if not mamba.scales:
            return projected
        inner = mamba.inner_size
        groups = mamba.groups_size
        parts = torch.split(projected, [inner, inner, groups, groups, mamba.num_heads], dim=-1)
        return torch.cat([part * scale for part, scale in zip(parts, mamba.scales, strict=True)], dim=-1)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """The RMS norm of each group, whose heads may be on several ranks. x [num_tokens, inner_size], fp32
        -> the same shape"""
        mamba = self._mamba
        groups = x.view(len(x), mamba.num_groups, -1)
        squares = groups.pow(2).sum(-1, keepdim=True)
        if mamba.num_group_copies > 1:
            squares = self._group.all_reduce(squares)
        mean = squares / (groups.shape[-1] * mamba.num_group_copies)
        normed: torch.Tensor = groups * torch.rsqrt(mean + self._eps)
        return normed.flatten(1)

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        mamba = self._mamba
        rank = self._group.rank
        size = self._group.size
        inner = Section(mamba.inner_size, rank, size)
        groups = Section(mamba.groups_size, *((0, 1) if mamba.num_group_copies > 1 else (rank, size)))
        conv = (inner, groups, groups)
        projection = (inner, *conv, Section(mamba.num_heads, rank, size))
        parts: dict[str, TensorPart] = {
            f"in_proj.{kind}": SectionedPart.of(each, projection)
            for kind, each in self.projection.named_parameters()
        }
        parts["conv1d.weight"] = SectionedPart.of(self.conv, conv)
        if self.conv_bias is not None:
            parts["conv1d.bias"] = SectionedPart.of(self.conv_bias, conv)
        for name, each in {"dt_bias": self.dt_bias, "A_log": self.a_log, "D": self.d}.items():
            parts[name] = TensorPart(each, 0, rank, size)
        if self.norm is not None:
            parts["norm.weight"] = TensorPart(self.norm, 0, rank, size)
        parts["out_proj.weight"] = TensorPart(self.output.weight, 1, rank, size)
        if self.output.bias is not None:
            parts["out_proj.bias"] = TensorPart(self.output.bias)
        return parts
