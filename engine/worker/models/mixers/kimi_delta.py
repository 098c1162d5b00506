"""Kimi Delta Attention (arXiv:2510.26692, section 3): a delta net whose decays differ by channel, and whose
decays and output gates are computed from few numbers."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm, softplus

from engine.worker.attention.backend import AttentionBackend
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.mixers.state_layers import StateLayer
from engine.worker.models.mixers.state_shapes import KimiDeltaShape
from engine.worker.models.shape import DecoderShape
from engine.worker.states.operations import Convolution, DeltaRule


class KimiDelta(StateLayer):
    """The delta attention of one layer, or a rank's heads of it."""

    def __init__(self, shape: DecoderShape, net: KimiDeltaShape, build: Builder) -> None:
        """``net``: the shape of this rank's part."""
        super().__init__()
        self._net = net
        self._group = build.group
        self._eps = shape.norm_eps
        hidden = shape.hidden_size
        size = net.heads_size
        self.qkv = build.linear(hidden, 3 * size, bias=False)
        self.rates = build.linear(hidden, net.num_heads, bias=False)
        """The linear that computes learning rates."""
        self.few = build.linear(hidden, 2 * net.head_size, bias=False)
        """The linear that computes the numbers from which decays and gates are; every rank has all of it."""
        self.decays = build.linear(net.head_size, size, bias=False)
        self.gates = build.linear(net.head_size, size, bias=False)
        self.conv = build.parameter(net.conv_size, 1, net.conv_width)
        self.dt_bias = build.parameter(size, dtype=torch.float32)
        self.a_log = build.parameter(net.num_heads, dtype=torch.float32)
        self.norm = build.parameter(net.head_size)
        self.output = build.row_parallel(size, hidden, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        states = self.states
        convolved = states.causal_conv(Convolution(self.qkv(x), self.conv.squeeze(1), has_silu=True))
        q, k, v = (self._heads(part) for part in convolved.chunk(3, dim=-1))
        of_decays, of_gates = self.few(x).chunk(2, dim=-1)
        steps = softplus(self._heads(self.decays(of_decays).float() + self.dt_bias))
        rule = DeltaRule(q, k, v, g=-self.a_log.exp()[:, None] * steps, beta=self.rates(x).sigmoid())
        attended = states.gated_delta_rule(rule).float()
        normed = rms_norm(attended, (self._net.head_size,), self.norm.float(), self._eps)
        opened = normed * self._heads(self.gates(of_gates)).float().sigmoid()
        output: torch.Tensor = self.output(opened.to(x.dtype).flatten(1))
        return output

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, heads_size] -> [num_tokens, num_heads, head_size]"""
        return x.view(len(x), self._net.num_heads, -1)

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        place = self._group.rank, self._group.size
        parts = {
            "b_proj.weight": TensorPart(self.rates.weight, 0, *place),
            "f_b_proj.weight": TensorPart(self.decays.weight, 0, *place),
            "g_b_proj.weight": TensorPart(self.gates.weight, 0, *place),
            "dt_bias": TensorPart(self.dt_bias, 0, *place),
            "A_log": TensorPart(self.a_log.view(1, 1, -1, 1), 2, *place),
            "o_norm.weight": TensorPart(self.norm),
            "o_proj.weight": TensorPart(self.output.weight, 1, *place),
        }
        for name, few in zip(("f_a_proj", "g_a_proj"), self.few.weight.chunk(2), strict=True):
            parts[f"{name}.weight"] = TensorPart(few)
        for kind, linear, conv in zip("qkv", self.qkv.weight.chunk(3), self.conv.chunk(3), strict=True):
            parts[f"{kind}_proj.weight"] = TensorPart(linear, 0, *place)
            parts[f"{kind}_conv1d.weight"] = TensorPart(conv, 0, *place)
        return parts
