"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families; their differences are in ``DecoderShape``.

Tokens of all sequences are flattened into one axis; only the attention backend knows which token belongs to
which sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu

from engine.errors import ConfigError
from engine.worker.attention.backend import AttentionBackend
from engine.worker.cpu.onednn_linear import OneDNNEmbedding, can_pack, packed_embedding, packed_linear
from engine.worker.cpu.packed_weights import (
    PackedEmbedding,
    compiled_gemm,
    interleaved_embedding,
    interleaved_linear,
)
from engine.worker.cpu.quantized_linear import (
    Int8Embedding,
    int4_linear,
    int8_embedding,
    int8_linear,
)
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.base import layer_windows
from engine.worker.models.linears import Embedding, replace_modules
from engine.worker.models.rotary import (
    STATIC_ROPE_TYPES,
    RotaryEmbedding,
    all_ropes,
    rope_parameters,
    rotate,
)
from engine.worker.parallel.group import ALONE, TensorParallelGroup
from engine.worker.parallel.linears import ParallelLMHead, RowParallelLinear, VocabParallelEmbedding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NATIVE_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def is_native(config: PreTrainedConfig) -> bool:
    """Whether ``Decoder`` computes exactly what this config describes."""
    rope = rope_parameters(config)
    return (
        config.model_type in NATIVE_MODEL_TYPES
        and config.hidden_act == "silu"
        and "" in all_ropes(config)
        and rope.get("rope_type", "default") in STATIC_ROPE_TYPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes and switches in which the families differ."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    windows: tuple[int | None, ...]
    num_kv_copies: int = 1
    """Number of ranks with the same key-value heads, if there are fewer heads than ranks."""

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> DecoderShape:
        # A config may have fields of other families: only those that its own code reads count.
        family = config.model_type
        has_bias = family in ("llama", "qwen3") and bool(getattr(config, "attention_bias", False))
        full = (None,) * config.num_hidden_layers
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            norm_eps=config.rms_norm_eps,
            qkv_bias=has_bias or family == "qwen2",
            output_bias=has_bias,
            mlp_bias=family == "llama" and bool(getattr(config, "mlp_bias", False)),
            qk_norm=family == "qwen3",
            tied=bool(config.tie_word_embeddings),
            windows=full if family == "llama" else tuple(layer_windows(config)),
        )

    def of_rank(self, num_ranks: int) -> DecoderShape:
        """The shape of each rank's part: some of the heads and of the MLP. ConfigError if the model cannot be
        split that way."""
        shared_out = {
            "number of heads,": self.num_heads,
            "intermediate size,": self.intermediate_size,
            "vocabulary size,": self.vocab_size,
        }
        for name, number in shared_out.items():
            if number % num_ranks:
                raise ConfigError(
                    f"tensor_parallel_size is {num_ranks}, which does not divide the model's {name} {number}."
                )
        if self.num_kv_heads % num_ranks and num_ranks % self.num_kv_heads:
            raise ConfigError(
                f"tensor_parallel_size is {num_ranks}, which neither divides the number of the model's "
                f"key-value heads, {self.num_kv_heads}, nor is a multiple of it."
            )
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=max(1, self.num_kv_heads // num_ranks),
            intermediate_size=self.intermediate_size // num_ranks,
            num_kv_copies=max(1, num_ranks // self.num_kv_heads),
        )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def _parameter(dtype: torch.dtype, *size: int) -> nn.Parameter:
    """A parameter on the meta device."""
    return nn.Parameter(torch.empty(size, device="meta", dtype=dtype))


def _linear(dtype: torch.dtype, inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A linear on the meta device."""
    return nn.Linear(inputs, outputs, bias, device="meta", dtype=dtype)


def _row_parallel(
    dtype: torch.dtype, inputs: int, outputs: int, bias: bool, group: TensorParallelGroup
) -> nn.Linear | RowParallelLinear:
    """A linear from this rank's inputs to all outputs."""
    if group.size == 1:
        return _linear(dtype, inputs, outputs, bias)
    partial = _linear(dtype, inputs, outputs, bias=False)
    return RowParallelLinear(partial, _parameter(dtype, outputs) if bias else None, group)


class DecoderLayer(nn.Module):
    """Attention and gated MLP, each with an RMS norm before it and a residual around it."""

    def __init__(
        self, shape: DecoderShape, index: int, dtype: torch.dtype, group: TensorParallelGroup
    ) -> None:
        """``shape``: the shape of this rank's part."""
        super().__init__()
        self._shape = shape
        self._group = group
        self._index = index
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.input_norm = _parameter(dtype, hidden)
        self.qkv = _linear(dtype, hidden, shape.query_size + 2 * shape.kv_size, shape.qkv_bias)
        self.q_norm = _parameter(dtype, shape.head_dim) if shape.qk_norm else None
        self.k_norm = _parameter(dtype, shape.head_dim) if shape.qk_norm else None
        self.output = _row_parallel(dtype, shape.query_size, hidden, shape.output_bias, group)
        self.post_attention_norm = _parameter(dtype, hidden)
        self.gate_up = _linear(dtype, hidden, 2 * inner, shape.mlp_bias)
        self.down = _row_parallel(dtype, inner, hidden, shape.mlp_bias, group)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        x = x + self._attend(self._norm(x, self.input_norm), cos, sin, attention)
        gate, up = self.gate_up(self._norm(x, self.post_attention_norm)).chunk(2, dim=-1)
        output: torch.Tensor = x + self.down(silu(gate).mul_(up))
        return output

    def _attend(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        shape = self._shape
        heads = self.qkv(x).view(len(x), -1, shape.head_dim)
        qk, v = heads[:, : -shape.num_kv_heads], heads[:, -shape.num_kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk[:, : shape.num_heads], qk[:, shape.num_heads :]
            qk = torch.cat((self._norm(q, self.q_norm), self._norm(k, self.k_norm)), dim=1)
        output: torch.Tensor = self.output(self._paged_attention(rotate(qk, cos, sin), v, attention))
        return output

    def attend(self, heads: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """heads [num_tokens, query_size + 2 * kv_size], queries and keys already rotated -> [num_tokens,
        query_size]"""
        heads = heads.view(len(heads), -1, self._shape.head_dim)
        num_kv_heads = self._shape.num_kv_heads
        return self._paged_attention(heads[:, :-num_kv_heads], heads[:, -num_kv_heads:], attention)

    def _paged_attention(
        self, qk: torch.Tensor, v: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        shape = self._shape
        attended = attention.attend(
            self._index,
            qk[:, : shape.num_heads],
            qk[:, shape.num_heads :],
            v,
            scale=shape.head_dim**-0.5,
            window=shape.windows[self._index],
        )
        return attended.flatten(1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self._shape.norm_eps)

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        shape, rank, size = self._shape, self._group.rank, self._group.size
        parts = {
            "input_layernorm.weight": TensorPart(self.input_norm),
            "post_attention_layernorm.weight": TensorPart(self.post_attention_norm),
        }
        if self.q_norm is not None and self.k_norm is not None:
            parts["self_attn.q_norm.weight"] = TensorPart(self.q_norm)
            parts["self_attn.k_norm.weight"] = TensorPart(self.k_norm)
        for kind, qkv in self.qkv.named_parameters():
            q, k, v = torch.split(qkv, [shape.query_size, shape.kv_size, shape.kv_size])
            kv_index, kv_count = rank // shape.num_kv_copies, size // shape.num_kv_copies
            parts[f"self_attn.q_proj.{kind}"] = TensorPart(q, 0, rank, size)
            parts[f"self_attn.k_proj.{kind}"] = TensorPart(k, 0, kv_index, kv_count)
            parts[f"self_attn.v_proj.{kind}"] = TensorPart(v, 0, kv_index, kv_count)
        for kind, gate_up in self.gate_up.named_parameters():
            gate, up = gate_up.chunk(2)
            parts[f"mlp.gate_proj.{kind}"] = TensorPart(gate, 0, rank, size)
            parts[f"mlp.up_proj.{kind}"] = TensorPart(up, 0, rank, size)
        for name, linear in (("self_attn.o_proj", self.output), ("mlp.down_proj", self.down)):
            parts[f"{name}.weight"] = TensorPart(linear.weight, 1, rank, size)
            if linear.bias is not None:
                parts[f"{name}.bias"] = TensorPart(linear.bias)
        return parts


@dataclass(frozen=True, slots=True)
class _Replacements:
    """The functions that replace loaded modules by packed or quantized ones."""

    linear: Callable[[nn.Linear], nn.Module]
    head: Callable[[nn.Linear], nn.Module]
    table: Callable[[Embedding], nn.Module]


class Decoder(nn.Module):
    """A CausalModel, or a rank's part of one. Built on the meta device; ``materialize`` allocates its
    parameters, uninitialized."""

    def __init__(
        self, config: PreTrainedConfig, dtype: torch.dtype, group: TensorParallelGroup = ALONE
    ) -> None:
        """Raises ConfigError if the model cannot be split among the group's ranks."""
        super().__init__()
        self._config = config
        self._group = group
        self.shape = shape = DecoderShape.from_config(config).of_rank(group.size)
        self.num_layers, self.num_kv_heads, self.head_dim = (
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
        )
        self.windows = shape.windows
        self.embedding = self._make_embedding(dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(shape, index, dtype, group) for index in range(shape.num_layers)
        )
        self.final_norm = _parameter(dtype, shape.hidden_size)
        self.lm_head = None if shape.tied else self._make_head(dtype)
        self._rotary: RotaryEmbedding | None = None

    def _make_embedding(
        self, dtype: torch.dtype
    ) -> Embedding | OneDNNEmbedding | Int8Embedding | PackedEmbedding | VocabParallelEmbedding:
        num_vectors = self.shape.vocab_size // self._group.size
        table = Embedding(_parameter(dtype, num_vectors, self.shape.hidden_size))
        return table if self._group.size == 1 else VocabParallelEmbedding(table, self._group)

    def _make_head(self, dtype: torch.dtype) -> nn.Linear | ParallelLMHead:
        linear = _linear(dtype, self.shape.hidden_size, self.shape.vocab_size // self._group.size, bias=False)
        return linear if self._group.size == 1 else ParallelLMHead(linear, self._group)

    def materialize(self, device: torch.device) -> None:
        # Not ``to_empty``: for meta tensors it imports sympy.
        self._apply(  # type: ignore[no-untyped-call]
            lambda parameter: torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        )
        self.requires_grad_(False)
        self._rotary = RotaryEmbedding(self._config, self.shape.head_dim, device)

    @property
    def rotary(self) -> RotaryEmbedding:
        assert self._rotary is not None, "materialize() comes first"
        return self._rotary

    def load(
        self,
        fill: Callable[[dict[str, TensorPart]], None],
        quantization: str | None = None,
        *,
        may_compile: bool = True,
    ) -> None:
        """Load the model section by section, and pack or quantize each before the next: at most one section
        is in memory twice. ``checkpoint_parts`` is not available afterwards."""
        replacements = self._choose_replacements(quantization, may_compile)
        fill(self._parts_of_ends())
        if self.lm_head is None:  # else the embedding is only looked up
            replace_modules(self, Embedding, replacements.table)
        for prefix, layer in self._named_layers():
            fill(_prefixed(prefix, layer.checkpoint_parts()))
            replace_modules(layer, nn.Linear, replacements.linear)
        if self.lm_head is not None:
            fill(self._parts_of_head(self.lm_head))
            replace_modules(self, nn.Linear, replacements.head)

    def _choose_replacements(self, quantization: str | None, may_compile: bool) -> _Replacements:
        """The LM head, whose quantization affects tokens most, gets at least 8 bits."""
        device, dtype = self.final_norm.device, self.final_norm.dtype
        compiled = compiled_gemm(self.head_dim, device, dtype) if may_compile else None
        if quantization is not None:
            quantized = int4_linear if quantization == "int4" else int8_linear
            return _Replacements(
                partial(quantized, gemm=compiled),
                partial(int8_linear, gemm=compiled),
                partial(int8_embedding, gemm=compiled),
            )
        if compiled is not None:
            interleaved = partial(interleaved_linear, gemm=compiled)
            return _Replacements(interleaved, interleaved, partial(interleaved_embedding, gemm=compiled))
        if can_pack(device, dtype):
            return _Replacements(packed_linear, packed_linear, packed_embedding)
        return _Replacements(_unchanged, _unchanged, _unchanged)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_rows: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See CausalModel.forward."""
        x = self.embedding(input_ids)
        cos, sin = self.rotary.angles(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        return self.logits_of(x[sample_rows])

    def logits_of(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_samples, hidden_size], after the last layer -> [num_samples, vocab_size], or [num_samples,
        0] on other ranks than the first"""
        return self.head(rms_norm(x, self.final_norm.shape, self.final_norm, self.shape.norm_eps))

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """The part of ``logits_of`` that follows the final norm."""
        if self.lm_head is None:
            return self.embedding.logits(normed)
        logits: torch.Tensor = self.lm_head(normed)
        return logits

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """Every tensor that the checkpoint must hold, with its part and the parameter that it fills."""
        parts = self._parts_of_ends()
        for prefix, layer in self._named_layers():
            parts |= _prefixed(prefix, layer.checkpoint_parts())
        return parts if self.lm_head is None else parts | self._parts_of_head(self.lm_head)

    def _parts_of_ends(self) -> dict[str, TensorPart]:
        assert isinstance(self.embedding, Embedding | VocabParallelEmbedding), "no parts after load()"
        rank, size = self._group.rank, self._group.size
        return {
            "model.embed_tokens.weight": TensorPart(self.embedding.weight, 0, rank, size),
            "model.norm.weight": TensorPart(self.final_norm),
        }

    def _parts_of_head(self, head: nn.Linear | ParallelLMHead) -> dict[str, TensorPart]:
        return {"lm_head.weight": TensorPart(head.weight, 0, self._group.rank, self._group.size)}

    def _named_layers(self) -> Iterator[tuple[str, DecoderLayer]]:
        """Each layer with the prefix of its tensors' names."""
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield f"model.layers.{index}.", layer


def _prefixed(prefix: str, parts: dict[str, TensorPart]) -> dict[str, TensorPart]:
    return {prefix + name: part for name, part in parts.items()}


def _unchanged(module: nn.Module) -> nn.Module:
    return module
