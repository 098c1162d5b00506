"""Heads that draft from a model's hidden states: one layer that reads the hidden state of a place and the
token of the next, and predicts the token after that.

Their layouts are published ones: multi-token prediction as in DeepSeek-V3 (arXiv:2412.19437, section 2.2),
GLM-4.5 and Qwen3-Next, EAGLE (arXiv:2401.15077), and EAGLE-3 (arXiv:2503.01840). They use the model's
embedding and, where a head has no LM head, the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn

from engine.worker.attention.backend import AttentionBackend
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.layer import DecoderLayer
from engine.worker.models.mixers.attention import SelfAttention
from engine.worker.models.mlp import GatedMLP
from engine.worker.models.norms import normed
from engine.worker.models.shape import DecoderShape, DenseShape
from engine.worker.models.step_values import StepValues

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines; see ``RotaryEmbedding.angles``."""


class HeadOutput(NamedTuple):
    """The outputs of a head for tokens; both [num_tokens, hidden_size]."""

    to_say: torch.Tensor
    """The input of the LM head."""
    hidden: torch.Tensor
    """The hidden states from which the head drafts the next token, in place of the model's."""


class DraftHead(Protocol):
    """The layer of a head. An nn.Module built on the meta device."""

    @property
    def lm_head(self) -> nn.Module | None:
        """The head's own LM head; None: it uses the model's."""

    @property
    def offsets(self) -> torch.Tensor | None:
        """[vocab_size] the model's id of a token minus its id in this head's LM head; None: both are
        equal."""

    def __call__(
        self, embedded: torch.Tensor, hidden: torch.Tensor, angles: Angles, attention: AttentionBackend
    ) -> HeadOutput:
        """embedded [num_tokens, hidden_size]: of the next tokens; hidden: of the places, from the model or
        from this head."""

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The tensors that the head's checkpoint must hold."""


@dataclass(frozen=True, slots=True)
class PredictionNames:
    """The names of the tensors of a layer for multi-token prediction."""

    layer: str
    """The prefix of the names of its decoder layer."""
    token_norm: str
    hidden_norm: str
    fuse: str
    norm: str


def names_in_layer(index: int) -> PredictionNames:
    """The names published for DeepSeek-V3 and GLM-4.5: in a layer after the model's last one."""
    layer = f"model.layers.{index}."
    of_layer = (f"{layer}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    return PredictionNames(layer, *of_layer)


NAMES_APART = PredictionNames(
    "mtp.layers.0.",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight",
    "mtp.norm.weight",
)
"""The names published for Qwen3-Next."""


class PredictionHead(nn.Module):
    """A layer for multi-token prediction: one of the model's own layers after a linear."""

    lm_head = None
    offsets = None

    def __init__(self, shape: DecoderShape, build: Builder, *, names: PredictionNames, fused: bool) -> None:
        """``shape``: of a single layer; ``fused``: see ``DecoderLayer.checkpoint_parts``."""
        super().__init__()
        size = shape.hidden_size
        self._shape = shape
        self._names = names
        self._fused = fused
        self.token_norm = build.parameter(size)
        self.hidden_norm = build.parameter(size)
        self.fuse = build.linear(2 * size, size, bias=False)
        self.layer = DecoderLayer(shape, 0, build, StepValues())
        self.norm = build.parameter(size)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, angles: Angles, attention: AttentionBackend
    ) -> HeadOutput:
        """See DraftHead. The output of its norm is its next input, like the output of the model's norm."""
        shape = self._shape
        both = normed(embedded, self.token_norm, shape), normed(hidden, self.hidden_norm, shape)
        x = normed(self.layer(self.fuse(torch.cat(both, dim=-1)), *angles, attention), self.norm, shape)
        return HeadOutput(x, x)

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """See DraftHead."""
        names = self._names
        layer = self.layer.checkpoint_parts(fused=self._fused)
        return {
            names.token_norm: TensorPart(self.token_norm),
            names.hidden_norm: TensorPart(self.hidden_norm),
            names.fuse: TensorPart(self.fuse.weight),
            names.norm: TensorPart(self.norm),
            **{names.layer + name: part for name, part in layer.items()},
        }


class _Layer(nn.Module):
    """Attention followed by a dense MLP, with a norm only between them."""

    def __init__(self, shape: DecoderShape, build: Builder) -> None:
        super().__init__()
        self._shape = shape
        mlp = shape.mlps[0]
        assert isinstance(mlp, DenseShape), "was checked"
        self.attention = SelfAttention(shape, 0, build)
        self.norm = build.parameter(shape.hidden_size)
        self.mlp = GatedMLP(shape.hidden_size, mlp, build)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, angles: Angles, attention: AttentionBackend
    ) -> torch.Tensor:
        """x: the input of attention; residual [num_tokens, hidden_size]: the tensor that attention's output
        is added to -> the residual after the layer"""
        residual = residual + self.attention(x, *angles, attention)
        output: torch.Tensor = residual + self.mlp(normed(residual, self.norm, self._shape))
        return output

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The parameters by their names in a head's folder."""
        attention = self.attention.checkpoint_parts()
        mlp = self.mlp.checkpoint_parts()
        return {
            **{f"layers.0.self_attn.{name}": part for name, part in attention.items()},
            **{f"layers.0.mlp.{name}": part for name, part in mlp.items()},
            "layers.0.post_attention_layernorm.weight": TensorPart(self.norm),
        }


class EagleHead(nn.Module):
    """The head of EAGLE, which predicts the model's next hidden state, after the final norm."""

    lm_head = None
    offsets = None

    def __init__(self, shape: DecoderShape, build: Builder, *, bias: bool) -> None:
        """``bias``: whether the linear that fuses token and hidden state has a bias."""
        super().__init__()
        self.fuse = build.linear(2 * shape.hidden_size, shape.hidden_size, bias)
        self.layer = _Layer(shape, build)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, angles: Angles, attention: AttentionBackend
    ) -> HeadOutput:
        """See DraftHead."""
        x = self.fuse(torch.cat((embedded, hidden), dim=-1))
        x = self.layer(x, x, angles, attention)
        return HeadOutput(x, x)

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """See DraftHead."""
        fuse = {f"fc.{name}": TensorPart(parameter) for name, parameter in self.fuse.named_parameters()}
        return fuse | self.layer.checkpoint_parts()


class Eagle3Head(nn.Module):
    """The head of EAGLE-3, which reads the inputs of several of the model's layers, and has a separate
    vocabulary: a subset of the model's tokens."""

    def __init__(
        self,
        shape: DecoderShape,
        build: Builder,
        *,
        num_layers: int,
        vocab_size: int | None,
        has_offsets: bool,
        norm_before_residual: bool,
    ) -> None:
        """``shape``: of a single layer. ``num_layers``: the model's layers whose inputs are read.
        ``vocab_size``: of its own LM head; None: it has none. ``has_offsets``: whether that has only a subset
        of the tokens. ``norm_before_residual``: whether the tensor that attention's output is added to is
        normalized, too."""
        super().__init__()
        size = shape.hidden_size
        self._shape = shape
        self._norm_before_residual = norm_before_residual
        self.fuse = build.linear(num_layers * size, size, bias=False)
        self.token_norm = build.parameter(size)
        self.hidden_norm = build.parameter(size)
        self.layer = _Layer(shape, build)
        qkv = self.layer.attention.qkv
        self.layer.attention.qkv = build.linear(2 * size, qkv.out_features, shape.qkv_bias)
        self.norm = build.parameter(size)
        self.lm_head = None if vocab_size is None else build.linear(size, vocab_size, bias=False)
        self.offsets = (
            nn.Parameter(torch.empty(vocab_size, dtype=torch.int64, device="meta"), requires_grad=False)
            if vocab_size is not None and has_offsets
            else None
        )
        """The model's id of a token minus its id here; None: they are equal."""

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, angles: Angles, attention: AttentionBackend
    ) -> HeadOutput:
        """See DraftHead. Hidden states from the model have the width of several layers."""
        shape = self._shape
        if hidden.shape[1] != embedded.shape[1]:
            hidden = self.fuse(hidden)
        normed_hidden = normed(hidden, self.hidden_norm, shape)
        x = torch.cat((normed(embedded, self.token_norm, shape), normed_hidden), dim=-1)
        residual = normed_hidden if self._norm_before_residual else hidden
        residual = self.layer(x, residual, angles, attention)
        return HeadOutput(normed(residual, self.norm, shape), residual)

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """See DraftHead."""
        parts = self.layer.checkpoint_parts() | {
            "fc.weight": TensorPart(self.fuse.weight),
            "layers.0.input_layernorm.weight": TensorPart(self.token_norm),
            "layers.0.hidden_norm.weight": TensorPart(self.hidden_norm),
            "norm.weight": TensorPart(self.norm),
        }
        if self.lm_head is not None:
            parts["lm_head.weight"] = TensorPart(self.lm_head.weight)
        if self.offsets is not None:
            parts["d2t"] = TensorPart(self.offsets)
        return parts
