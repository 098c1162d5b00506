"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families; what differs is in ``DecoderShape``.

Tokens of all sequences are flattened into one axis; which belongs to whom only the attention backend knows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedConfig

from engine.worker.attention.backend import AttentionBackend
from engine.worker.models.base import layer_windows
from engine.worker.models.linears import Table, VectorTable, replace_linears
from engine.worker.models.packed_linear import can_pack, packed_linear, packed_table
from engine.worker.models.quantized_linear import Int8Table, int4_linear, int8_linear
from engine.worker.models.rotary import STATIC_ROPE_TYPES, RotaryEmbedding, rope_parameters, rotate

NATIVE_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def is_native(config: PreTrainedConfig) -> bool:
    """Whether ``Decoder`` computes exactly what this config describes."""
    rope = rope_parameters(config)
    return (
        config.model_type in NATIVE_MODEL_TYPES
        and config.hidden_act == "silu"
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

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> DecoderShape:
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            norm_eps=config.rms_norm_eps,
            qkv_bias=attention_bias or config.model_type == "qwen2",
            output_bias=attention_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=config.model_type == "qwen3",
            tied=bool(config.tie_word_embeddings),
            windows=tuple(layer_windows(config)),
        )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def _parameter(dtype: torch.dtype, *size: int) -> nn.Parameter:
    """A parameter that takes no memory yet."""
    return nn.Parameter(torch.empty(size, device="meta", dtype=dtype))


class DecoderLayer(nn.Module):
    """Attention and gated MLP, each behind an RMS norm, each added to the residual."""

    def __init__(self, shape: DecoderShape, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._shape = shape
        self._index = index
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.input_norm = _parameter(dtype, hidden)
        self.qkv = nn.Linear(
            hidden, shape.query_size + 2 * shape.kv_size, shape.qkv_bias, device="meta", dtype=dtype
        )
        self.q_norm = _parameter(dtype, shape.head_dim) if shape.qk_norm else None
        self.k_norm = _parameter(dtype, shape.head_dim) if shape.qk_norm else None
        self.output = nn.Linear(shape.query_size, hidden, shape.output_bias, device="meta", dtype=dtype)
        self.post_attention_norm = _parameter(dtype, hidden)
        self.gate_up = nn.Linear(hidden, 2 * inner, shape.mlp_bias, device="meta", dtype=dtype)
        self.down = nn.Linear(inner, hidden, shape.mlp_bias, device="meta", dtype=dtype)

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
        output: torch.Tensor = self.output(self._over_pages(rotate(qk, cos, sin), v, attention))
        return output

    def attend(self, heads: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """heads [num_tokens, query_size + 2 * kv_size], queries and keys already rotated -> [num_tokens,
        query_size]"""
        heads = heads.view(len(heads), -1, self._shape.head_dim)
        num_kv_heads = self._shape.num_kv_heads
        return self._over_pages(heads[:, :-num_kv_heads], heads[:, -num_kv_heads:], attention)

    def _over_pages(self, qk: torch.Tensor, v: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
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

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """The checkpoint's tensor names, each with the part of a parameter that it fills."""
        shape = self._shape
        views: dict[str, torch.Tensor] = {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.post_attention_norm,
        }
        if self.q_norm is not None and self.k_norm is not None:
            views |= {"self_attn.q_norm.weight": self.q_norm, "self_attn.k_norm.weight": self.k_norm}
        sections = (shape.query_size, shape.kv_size, shape.kv_size)
        for module, names, sizes in (
            (self.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), sections),
            (self.output, ("self_attn.o_proj",), (shape.hidden_size,)),
            (self.gate_up, ("mlp.gate_proj", "mlp.up_proj"), (shape.intermediate_size,) * 2),
            (self.down, ("mlp.down_proj",), (shape.hidden_size,)),
        ):
            for kind, parameter in module.named_parameters():
                views |= {
                    f"{name}.{kind}": part
                    for name, part in zip(names, torch.split(parameter, list(sizes)), strict=True)
                }
        return views


class Decoder(nn.Module):
    """A CausalModel. Built without memory; ``materialize`` gives it its parameters, uninitialised."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self._config = config
        self.shape = shape = DecoderShape.from_config(config)
        self.num_layers, self.num_kv_heads, self.head_dim = (
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
        )
        self.embedding: VectorTable = Table(_parameter(dtype, shape.vocab_size, shape.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(shape, index, dtype) for index in range(shape.num_layers))
        self.final_norm = _parameter(dtype, shape.hidden_size)
        self.lm_head = (
            None
            if shape.tied
            else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, device="meta", dtype=dtype)
        )
        self._rotary: RotaryEmbedding | None = None

    def materialize(self, device: torch.device) -> None:
        # Not by ``to_empty``: what it makes of tensors without memory imports a library of algebra.
        self._apply(  # type: ignore[no-untyped-call]
            lambda parameter: torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        )
        self.requires_grad_(False)
        self._rotary = RotaryEmbedding(self._config, self.shape.head_dim, device)

    @property
    def rotary(self) -> RotaryEmbedding:
        assert self._rotary is not None, "materialize() comes first"
        return self._rotary

    def finish_loading(self, quantization: str | None = None) -> None:
        """Make of the loaded weights what this device multiplies fastest or, if told so, round them to 8 or 4
        bits; ``checkpoint_views`` is no more."""
        if quantization is not None:
            self._quantize(quantization)
        elif can_pack(self.final_norm.device, self.final_norm.dtype):
            replace_linears(self, packed_linear)
            if self.lm_head is None and isinstance(self.embedding, Table):
                self.embedding = packed_table(self.embedding)

    def _quantize(self, quantization: str) -> None:
        """The head, to whose rounding the tokens are most sensitive, has at least 8 bits."""
        if self.lm_head is not None:
            self.add_module("lm_head", int8_linear(self.lm_head))
        elif isinstance(self.embedding, Table):
            self.embedding = Int8Table(self.embedding)
        replace_linears(self.layers, int4_linear if quantization == "int4" else int8_linear)

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
        """x [num_samples, hidden_size], after the last layer -> [num_samples, vocab_size]"""
        sampled = rms_norm(x, self.final_norm.shape, self.final_norm, self.shape.norm_eps)
        if self.lm_head is None:
            return self.embedding.products(sampled)
        logits: torch.Tensor = self.lm_head(sampled)
        return logits

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Every tensor that the checkpoint must hold, with the part of a parameter that it fills."""
        assert isinstance(self.embedding, Table), "after finish_loading() there are no views"
        views: dict[str, torch.Tensor] = {"model.embed_tokens.weight": self.embedding.weight}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            prefix = f"model.layers.{index}."
            views |= {prefix + name: view for name, view in layer.checkpoint_views().items()}
        views["model.norm.weight"] = self.final_norm
        if self.lm_head is not None:
            views["lm_head.weight"] = self.lm_head.weight
        return views
