"""A decoder's gated delta net (arXiv:2412.06464), which replaces attention in most layers of Qwen3-Next,
Qwen3.5 and Olmo Hybrid."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import rms_norm, softplus

from engine.worker.attention.backend import AttentionBackend
from engine.worker.loading.tensor_part import Section, SectionedPart, TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.mixers.state_layers import StateLayer, gated
from engine.worker.models.mixers.state_shapes import DeltaNetShape
from engine.worker.models.shape import DecoderShape
from engine.worker.states.operations import Convolution, DeltaRule


class GatedDeltaNet(StateLayer):
    """The delta net of one layer, or a rank's heads of it."""

    checkpoint_prefix = "linear_attn."

    def __init__(self, shape: DecoderShape, net: DeltaNetShape, build: Builder) -> None:
        """``net``: the shape of this rank's part."""
        super().__init__()
        self._net = net
        self._group = build.group
        self._eps = shape.norm_eps if net.norm_eps is None else net.norm_eps
        hidden = shape.hidden_size
        self.qkvz = build.linear(hidden, net.conv_size + net.values_size, bias=False)
        """The linear that computes queries, keys, values and output gates."""
        self.ba = build.linear(hidden, 2 * net.num_v_heads, bias=False)
        """The linear that computes learning rates and decays."""
        self.conv = build.parameter(net.conv_size, 1, net.conv_width)
        self.dt_bias = build.parameter(net.num_v_heads, dtype=torch.float32)
        self.a_log = build.parameter(net.num_v_heads, dtype=torch.float32)
        self.norm = build.parameter(net.v_size)
        self.output = build.row_parallel(net.values_size, hidden, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        net = self._net
        states = self.states
        mixed, z = self._split_values(self.qkvz(x))
        b, a = self._split_rates(self.ba(x))
        convolved = states.causal_conv(Convolution(mixed, self.conv.squeeze(1), has_silu=True))
        q, k, v = torch.split(convolved, [net.keys_size, net.keys_size, net.values_size], dim=-1)
        decay = -self.a_log.exp() * softplus(a.float() + self.dt_bias)
        rule = DeltaRule(
            q=q.view(len(x), -1, net.k_size),
            k=k.view(len(x), -1, net.k_size),
            v=v.view(len(x), -1, net.v_size),
            g=decay,
            beta=b.sigmoid() * net.rate_scale,
        )
        attended = states.gated_delta_rule(rule)
        normed = rms_norm(attended.float(), (net.v_size,), eps=self._eps).to(x.dtype)
        opened = gated(self.norm * normed, z.view_as(attended)).to(x.dtype)
        output: torch.Tensor = self.output(opened.flatten(1))
        return output

    def _split_values(self, qkvz: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, keys and values of all heads [num_tokens, conv_size], and gates [num_tokens,
        values_size]."""
        net = self._net
        if not net.by_head:
            mixed, z = torch.split(qkvz, [net.conv_size, net.values_size], dim=-1)
            return mixed, z
        values_each = net.values_size // net.num_k_heads
        heads = qkvz.view(len(qkvz), net.num_k_heads, -1)
        *mixed_parts, z = torch.split(heads, [net.k_size, net.k_size, values_each, values_each], dim=-1)
        return torch.cat([part.flatten(1) for part in mixed_parts], dim=-1), z.flatten(1)

    def _split_rates(self, ba: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Learning rates and decays [num_tokens, num_v_heads], before their activation functions."""
        if not self._net.by_head:
            b, a = ba.chunk(2, dim=-1)
            return b, a
        b, a = ba.view(len(ba), self._net.num_k_heads, 2, -1).unbind(2)
        return b.flatten(1), a.flatten(1)

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        rank = self._group.rank
        size = self._group.size
        parts = {
            "dt_bias": TensorPart(self.dt_bias, 0, rank, size),
            "A_log": TensorPart(self.a_log, 0, rank, size),
            "norm.weight": TensorPart(self.norm),
            "out_proj.weight": TensorPart(self.output.weight, 1, rank, size),
        }
        if self._net.separate:
            own = {"norm.weight": "o_norm.weight", "out_proj.weight": "o_proj.weight"}
            return {own.get(name, name): part for name, part in parts.items()} | self._separate_parts()
        return {**self._projection_parts(), "conv1d.weight": self._of_qkv(self.conv), **parts}

    def _separate_parts(self) -> dict[str, TensorPart]:
        """The linears and the convolutions of a checkpoint that has one for each kind."""
        net = self._net
        place = self._group.rank, self._group.size
        sizes = [net.keys_size, net.keys_size, net.values_size]
        linears = torch.split(self.qkvz.weight, [*sizes, net.values_size])
        parts = {
            f"{kind}_proj.weight": TensorPart(linear, 0, *place)
            for kind, linear in zip("qkvgba", (*linears, *self.ba.weight.chunk(2)), strict=True)
        }
        convs = zip("qkv", torch.split(self.conv, sizes), strict=True)
        return parts | {f"{kind}_conv1d.weight": TensorPart(conv, 0, *place) for kind, conv in convs}

    def _projection_parts(self) -> dict[str, TensorPart]:
        net = self._net
        rank = self._group.rank
        size = self._group.size
        qkvz = self.qkvz.weight
        ba = self.ba.weight
        if net.by_head:
            return {
                "in_proj_qkvz.weight": TensorPart(qkvz, 0, rank, size),
                "in_proj_ba.weight": TensorPart(ba, 0, rank, size),
            }
        qkv, z = torch.split(qkvz, [net.conv_size, net.values_size])
        b, a = ba.chunk(2)
        return {
            "in_proj_qkv.weight": self._of_qkv(qkv),
            "in_proj_z.weight": TensorPart(z, 0, rank, size),
            "in_proj_b.weight": TensorPart(b, 0, rank, size),
            "in_proj_a.weight": TensorPart(a, 0, rank, size),
        }

    def _of_qkv(self, view: torch.Tensor | nn.Parameter) -> TensorPart:
        """This rank's queries, keys and values, which a checkpoint concatenates."""
        net = self._net
        rank = self._group.rank
        size = self._group.size
        sizes = (net.keys_size, net.keys_size, net.values_size)
        return SectionedPart.of(view, tuple(Section(each, rank, size) for each in sizes))
