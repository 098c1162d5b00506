"""Embeddings of tokens for each layer, and layers that read them and multiply their output by a number (Gemma
3n and 4)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import gelu, linear, rms_norm

from engine.worker.attention.backend import AttentionBackend
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.layer import DecoderLayer
from engine.worker.models.linears import Embedding
from engine.worker.models.shape import DecoderShape, LayerInputShape
from engine.worker.models.step_values import StepValues

_SHARE_OF_EACH = 2.0**-0.5


class LayerInputs(nn.Module):
    """The inputs of all layers besides their hidden states, half from a table, half from the embeddings.
    Every rank has all of it."""

    def __init__(self, shape: DecoderShape, inputs: LayerInputShape, build: Builder) -> None:
        super().__init__()
        self._shape = shape
        self._size = inputs.size
        width = shape.num_layers * inputs.size
        self.table = Embedding(build.parameter(inputs.vocab_size, width))
        self.projection = build.parameter(width, shape.hidden_size)
        self.norm = build.parameter(inputs.size)

    def forward(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """input_ids [num_tokens]; x [num_tokens, hidden_size], their embeddings -> [num_tokens, num_layers,
        size]"""
        shape = len(input_ids), self._shape.num_layers, self._size
        scale = torch.tensor(self._size**0.5, dtype=x.dtype).item()
        of_tokens: torch.Tensor = self.table(input_ids) * scale
        projected = (linear(x, self.projection) * self._shape.hidden_size**-0.5).view(shape)
        normed = rms_norm(projected, self.norm.shape, self.norm, self._shape.norm_eps)
        return (normed + of_tokens.view(shape)) * _SHARE_OF_EACH

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        return {
            "model.embed_tokens_per_layer.weight": TensorPart(self.table.weight),
            "model.per_layer_model_projection.weight": TensorPart(self.projection),
            "model.per_layer_projection_norm.weight": TensorPart(self.norm),
        }


class _GatedInput(nn.Module):
    """Adds to a layer's output what its gate lets through of the layer's own input."""

    def __init__(self, shape: DecoderShape, size: int, build: Builder) -> None:
        super().__init__()
        self._eps = shape.norm_eps
        self.gate = build.linear(shape.hidden_size, size, bias=False)
        self.projection = build.linear(size, shape.hidden_size, bias=False)
        self.norm = build.parameter(shape.hidden_size)

    def forward(self, x: torch.Tensor, layer_input: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size]; layer_input [num_tokens, size] -> like x"""
        gated = gelu(self.gate(x), approximate="tanh") * layer_input
        return x + rms_norm(self.projection(gated), self.norm.shape, self.norm, self._eps)

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        return {
            "per_layer_input_gate.weight": TensorPart(self.gate.weight),
            "per_layer_projection.weight": TensorPart(self.projection.weight),
            "post_per_layer_input_norm.weight": TensorPart(self.norm),
        }


class ScaledLayer(DecoderLayer):
    """A DecoderLayer whose output is multiplied by a number, after an input of its own is added if it has
    one."""

    def __init__(self, shape: DecoderShape, index: int, build: Builder, values: StepValues) -> None:
        super().__init__(shape, index, build, values)
        self._number = index
        self._values = values
        self.scalar = build.parameter(1)
        inputs = shape.layer_inputs
        self.input = None if inputs is None else _GatedInput(shape, inputs.size, build)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        x = super().forward(x, cos, sin, attention)
        if self.input is not None:
            assert self._values.layer_inputs is not None, "the decoder sets them"
            x = self.input(x, self._values.layer_inputs[:, self._number])
        return x * self.scalar

    def checkpoint_parts(self, *, fused: bool = False) -> dict[str, TensorPart]:
        """See DecoderLayer."""
        parts = super().checkpoint_parts(fused=fused) | {"layer_scalar": TensorPart(self.scalar)}
        return parts if self.input is None else parts | self.input.checkpoint_parts()
