"""Self-attention whose values are normalized. Layers may take their values from their keys, or attend to the
keys and values of a layer before them (Gemma 4)."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm

from engine.worker.attention.backend import AttentionBackend
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.mixers.attention import SelfAttention
from engine.worker.models.norms import normed
from engine.worker.models.rotary import rotate
from engine.worker.models.shape import DecoderShape
from engine.worker.models.step_values import StepValues


class KvSharingAttention(SelfAttention):
    """The attention of one layer, or a rank's heads of it."""

    def __init__(self, shape: DecoderShape, layer: int, build: Builder, values: StepValues) -> None:
        """``shape``: with the heads of this layer."""
        super().__init__(shape, shape.attention_index(layer), build)
        self._values = values
        readers = [other for other, kv in enumerate(shape.kv_of) if kv == self._index]
        self._is_shared = len(readers) > 1
        self._is_last = bool(readers) and layer == readers[-1]
        """Whether no later layer attends to the same keys and values."""
        self.has_keys = shape.has_own_kv(layer)
        self.has_values = self.has_keys and not shape.layer_heads[layer].keys_are_values
        sizes = shape.query_size + shape.kv_size * (self.has_keys + self.has_values)
        self.qkv = build.linear(shape.hidden_size, sizes, shape.qkv_bias)
        if not self.has_keys:
            self.k_norm = None

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        shape = self.shape
        heads = self.qkv(x).view(len(x), -1, shape.head_dim)
        assert self.q_norm is not None
        query = rotate(normed(heads[:, : shape.num_heads], self.q_norm, shape), cos, sin)
        shared = self._values.keys_and_values
        if self.has_keys:
            key, value = self._keys_and_values(heads[:, shape.num_heads :], cos, sin)
        else:  # it writes those of the other layer once more: the same numbers to the same place
            key, value = shared[self._index]
        if self._is_last:
            shared.pop(self._index, None)
        elif self._is_shared:
            shared[self._index] = key, value
        attended = attention.attend(
            self._index,
            query,
            key,
            value,
            scale=shape.attention_scale or shape.head_dim**-0.5,
            window=shape.windows[self._index],
        )
        output: torch.Tensor = self.output(attended.flatten(1))
        return output

    def _keys_and_values(
        self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """heads [num_tokens, one or two times num_kv_heads, head_dim] -> both [num_tokens, num_kv_heads,
        head_dim]"""
        shape = self.shape
        assert self.k_norm is not None
        keys = heads[:, : shape.num_kv_heads]
        values = heads[:, shape.num_kv_heads :] if self.has_values else keys
        rotated = rotate(normed(keys, self.k_norm, shape), cos, sin)
        return rotated, rms_norm(values, values.shape[2:], eps=shape.norm_eps)

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        shape = self.shape
        rank = self._group.rank
        size = self._group.size
        of_kv = rank // shape.num_kv_copies, size // shape.num_kv_copies
        assert self.q_norm is not None
        parts = {"q_norm.weight": TensorPart(self.q_norm)}
        if self.k_norm is not None:
            parts["k_norm.weight"] = TensorPart(self.k_norm)
        keys_end = shape.query_size + shape.kv_size
        for kind, qkv in self.qkv.named_parameters():
            parts[f"q_proj.{kind}"] = TensorPart(qkv[: shape.query_size], 0, rank, size)
            if self.has_keys:
                parts[f"k_proj.{kind}"] = TensorPart(qkv[shape.query_size : keys_end], 0, *of_kv)
            if self.has_values:
                parts[f"v_proj.{kind}"] = TensorPart(qkv[keys_end:], 0, *of_kv)
        parts["o_proj.weight"] = TensorPart(self.output.weight, 1, rank, size)
        if self.output.bias is not None:
            parts["o_proj.bias"] = TensorPart(self.output.bias)
        return parts

    def is_unused(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor of the attention although it is not used."""
        kind = name.partition(".")[0]
        return kind in ("k_proj", "v_proj", "k_norm") and not self.has_keys
