"""One layer of a decoder: attention or a state, an MLP or experts, norms and residual connections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from engine.worker.attention.backend import AttentionBackend
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.dense_and_sparse import DenseAndSparse
from engine.worker.models.mixers.attention import SelfAttention
from engine.worker.models.mixers.attention_beside_state import AttentionBesideState
from engine.worker.models.mixers.gated_delta_net import GatedDeltaNet
from engine.worker.models.mixers.kimi_delta import KimiDelta
from engine.worker.models.mixers.kv_sharing_attention import KvSharingAttention
from engine.worker.models.mixers.latent_attention import LatentAttention
from engine.worker.models.mixers.mamba1 import Mamba1
from engine.worker.models.mixers.mamba2 import Mamba2
from engine.worker.models.mixers.mixed_rope_attention import MixedRopeAttention
from engine.worker.models.mixers.short_conv import ShortConv
from engine.worker.models.mixers.state_shapes import (
    DeltaNetShape,
    KimiDeltaShape,
    Mamba1Shape,
    ShortConvShape,
)
from engine.worker.models.mlp import GatedMLP, SquaredMLP, XieluMLP
from engine.worker.models.moe import MixtureOfExperts
from engine.worker.models.norms import normed
from engine.worker.models.shape import DecoderShape, DenseShape, MLPShape, PairShape
from engine.worker.models.step_values import StepValues

Mixer = (
    SelfAttention
    | LatentAttention
    | GatedDeltaNet
    | KimiDelta
    | Mamba1
    | Mamba2
    | ShortConv
    | AttentionBesideState
)


class DecoderLayer(nn.Module):
    """Attention and an MLP, or one of them, each with an RMS norm before or after it, and a residual
    connection around it."""

    def __init__(self, shape: DecoderShape, index: int, build: Builder, values: StepValues) -> None:
        """``shape``: the shape of this rank's part. ``values``: what layers leave to each other."""
        super().__init__()
        self._shape = shape
        size = shape.hidden_size
        mixes, mlp = shape.mixes_in(index), shape.mlps[index]
        of_inputs, of_outputs = shape.normalizes(index)
        self.input_norm = build.parameter(size) if of_inputs and mixes else None
        self.attention = build_mixer(shape, index, build, values) if mixes else None
        self.attention_output_norm = build.parameter(size) if of_outputs else None
        has_norm = of_inputs and mlp and not isinstance(mlp, PairShape) and not shape.parallel_mlps
        self.post_attention_norm = build.parameter(size) if has_norm else None
        self.mlp_output_norm = build.parameter(size) if of_outputs else None
        self.mlp = None if mlp is None else _build_mlp(shape, mlp, build)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        if self._shape.parallel_mlps:
            assert self.attention is not None
            assert self.mlp is not None
            normed_x = self._norm(x, self.input_norm)
            beside: torch.Tensor = x + self.attention(normed_x, cos, sin, attention) + self.mlp(normed_x)
            return beside
        if self.attention is not None:
            attended = self.attention(self._norm(x, self.input_norm), cos, sin, attention)
            x = x + self._scaled(self._norm(attended, self.attention_output_norm))
        if self.mlp is None:
            return x
        output: torch.Tensor = self.mlp(self._norm(x, self.post_attention_norm))
        return x + self._scaled(self._norm(output, self.mlp_output_norm))

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        scale = self._shape.residual_scale
        return x if scale == 1.0 else x * scale

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else normed(x, weight, self._shape)

    def checkpoint_parts(self, *, fused: bool = False) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills. ``fused``: see
        ``Experts.fused_parts``."""
        parts = {f"{name}.weight": TensorPart(norm) for name, norm in self._named_norms() if norm is not None}
        mixer = self.attention
        if mixer is not None:
            prefix = getattr(mixer, "checkpoint_prefix", "self_attn.")
            parts |= prefixed(prefix, mixer.checkpoint_parts())
        if isinstance(self.mlp, MixtureOfExperts | DenseAndSparse):
            parts |= self.mlp.checkpoint_parts(fused=fused)
        elif self.mlp is not None:
            parts |= prefixed(self._shape.mlp_prefix, self.mlp.checkpoint_parts())
        return {renamed(name, self._shape.other_names): part for name, part in parts.items()}

    def _named_norms(self) -> Iterator[tuple[str, nn.Parameter | None]]:
        """The layer's norms, by their names in checkpoints: with output norms, by Gemma's names. None in
        place of those that it does not have."""
        yield "input_layernorm", self.input_norm
        if self.attention_output_norm is None or self.mlp_output_norm is None:
            yield "post_attention_layernorm", self.post_attention_norm
            return
        yield "post_attention_layernorm", self.attention_output_norm
        yield "pre_feedforward_layernorm", self.post_attention_norm
        yield "post_feedforward_layernorm", self.mlp_output_norm


def build_mixer(shape: DecoderShape, index: int, build: Builder, values: StepValues) -> Mixer:
    """The module that mixes tokens in a layer: attention, or one with a state instead."""
    if shape.unit_values:
        return KvSharingAttention(shape.of_layer(index), index, build, values)
    if shape.states:
        state = shape.states[index]
        if state is not None:
            if isinstance(state, DeltaNetShape):
                return GatedDeltaNet(shape, state, build)
            if isinstance(state, KimiDeltaShape):
                return KimiDelta(shape, state, build)
            if isinstance(state, ShortConvShape):
                return ShortConv(shape, state, build)
            if isinstance(state, Mamba1Shape):
                return Mamba1(shape, state, build)
            if shape.beside is not None:
                return AttentionBesideState(shape, shape.beside, state, index, build)
            return Mamba2(shape, state, build)
        index = shape.attention_index(index)
    if shape.mixed_rope is not None:
        return MixedRopeAttention(shape, shape.mixed_rope, index, build)
    if shape.latent is not None:
        return LatentAttention(shape, shape.latent, index, build)
    return SelfAttention(shape.of_layer(index), index, build)


def _build_mlp(
    shape: DecoderShape, mlp: MLPShape, build: Builder
) -> GatedMLP | SquaredMLP | XieluMLP | MixtureOfExperts | DenseAndSparse:
    if isinstance(mlp, DenseShape):
        kind = SquaredMLP if mlp.squared else XieluMLP if mlp.by_xielu else GatedMLP
        return kind(shape.hidden_size, mlp, build)
    if isinstance(mlp, PairShape):
        return DenseAndSparse(shape, mlp, build)
    return MixtureOfExperts(shape.hidden_size, mlp, build)


def prefixed(prefix: str, parts: dict[str, TensorPart]) -> dict[str, TensorPart]:
    """The parts, with a prefix before each name."""
    return {prefix + name: part for name, part in parts.items()}


def renamed(name: str, other_names: Sequence[tuple[str, str]]) -> str:
    """The name in the checkpoint of a layer's tensor."""
    for own, other in other_names:
        if name.startswith(own):
            return other + name.removeprefix(own)
    return name
