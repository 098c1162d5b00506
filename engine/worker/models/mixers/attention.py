"""A decoder's self-attention: projections, head norms and rope around an attention backend."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import pad

from engine.worker.attention.backend import AttentionBackend
from engine.worker.loading.tensor_part import Section, SectionedPart, TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.norms import normed
from engine.worker.models.rotary import pairs_apart, rotate
from engine.worker.models.shape import DecoderShape


class SelfAttention(nn.Module):
    """The attention of one layer, or a rank's heads of it."""

    def __init__(self, shape: DecoderShape, index: int, build: Builder) -> None:
        """``index``: the layer's number among those with attention."""
        super().__init__()
        self.shape = shape
        self._index = index
        self._chunk = shape.layer_chunks[index]
        self._group = build.group
        hidden = shape.hidden_size
        self.queries_size = shape.query_size * (2 if shape.output_gate else 1)
        """The number of outputs of ``qkv`` before the keys."""
        outputs = self.queries_size + shape.kv_size + shape.values_size
        self.qkv = build.linear(hidden, outputs, shape.qkv_bias)
        q_size = shape.query_size if shape.norms_all_heads else shape.head_dim
        k_size = shape.kv_size if shape.norms_all_heads else shape.head_dim
        self.q_norm = build.parameter(q_size) if shape.qk_norm else None
        self.k_norm = build.parameter(k_size) if shape.qk_norm else None
        self.head_gate = build.linear(hidden, shape.num_heads, bias=False) if shape.head_gates else None
        self.sinks = build.parameter(shape.num_heads, dtype=torch.float32) if shape.sinks else None
        self.output = build.row_parallel(shape.attended_size, hidden, shape.output_bias)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        shape = self.shape
        qk, v = self._split(self.qkv(x))
        gate = None
        if shape.output_gate:
            pairs = 2 * shape.num_heads
            gate = qk[:, 1:pairs:2]
            qk = torch.cat((qk[:, :pairs:2], qk[:, pairs:]), dim=1)
        qk = self._positioned(qk, cos, sin)
        attended = attention.attend(
            self._index,
            qk[:, : shape.num_heads],
            qk[:, shape.num_heads :],
            v,
            scale=shape.attention_scale or shape.head_dim**-0.5,
            window=shape.windows[self._index],
            chunk=self._chunk,
            soft_cap=shape.attention_cap,
            sinks=self.sinks,
        )
        if shape.value_dim:
            attended = attended[..., : shape.value_dim]
        if gate is not None:
            attended = attended * gate.sigmoid()
        if self.head_gate is not None:
            attended = attended * self.head_gate(x).sigmoid()[..., None]
        output: torch.Tensor = self.output(attended.flatten(1))
        return output

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, with gates, and keys [num_tokens, heads, head_dim], and values [num_tokens, num_kv_heads,
        head_dim]."""
        shape = self.shape
        if not shape.value_dim:
            heads = qkv.view(len(qkv), -1, shape.head_dim)
            return heads[:, : -shape.num_kv_heads], heads[:, -shape.num_kv_heads :]
        qk, v = torch.split(qkv, [self.queries_size + shape.kv_size, shape.values_size], dim=-1)
        values = v.view(len(v), shape.num_kv_heads, shape.value_dim) * shape.value_scale
        padded = pad(values, (0, shape.head_dim - shape.value_dim))
        return qk.view(len(qk), -1, shape.head_dim), padded

    def _positioned(self, qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Apply norms and rope to queries and keys, and let queries grow. qk [num_tokens, num_heads +
        num_kv_heads, head_dim] -> the same shape"""
        if self.q_norm is not None and self.k_norm is not None:
            q = qk[:, : self.shape.num_heads]
            k = qk[:, self.shape.num_heads :]
            qk = torch.cat(self._normed(q, k, self.q_norm, self.k_norm), dim=1)
        if not self.shape.has_rope:
            return qk
        if self.shape.query_growth is not None:
            qk = rotate(qk, cos[..., :-1], sin)
            q = qk[:, : self.shape.num_heads] * cos[..., -1:]
            return torch.cat((q, qk[:, self.shape.num_heads :]), dim=1)
        pairs = pairs_apart(qk, cos.shape[-1]) if self.shape.neighbor_rope else qk
        return rotate(pairs, cos, sin).to(qk.dtype)

    def _normed(
        self, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norms of each head, or of all heads. q [num_tokens, num_heads, head_dim], k [num_tokens,
        num_kv_heads, head_dim] -> the same shapes"""
        shape = self.shape
        if not shape.norms_all_heads:
            return normed(q, q_weight, shape), normed(k, k_weight, shape)
        if self._group.size == 1:
            q_normed = normed(q.flatten(1), q_weight, shape)
            return q_normed.view_as(q), normed(k.flatten(1), k_weight, shape).view_as(k)
        # Heads of which ranks have copies count as often in the sum as in the number of its terms.
        squares = torch.stack([x.float().square().sum(dim=(1, 2)) for x in (q, k)])
        q_sum, k_sum = self._group.all_reduce(squares)[:, :, None, None]
        return self._of_all(q, q_sum, q_weight), self._of_all(k, k_sum, k_weight)

    def _of_all(self, x: torch.Tensor, sum_of_squares: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """This rank's heads, normalized by all ranks' sum of squares."""
        mean = sum_of_squares / (x[0].numel() * self._group.size)
        scaled = x.float() * torch.rsqrt(mean + self.shape.norm_eps)
        return scaled.to(x.dtype) * weight.view(x.shape[1:])

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        shape = self.shape
        rank = self._group.rank
        size = self._group.size
        kv_index = rank // shape.num_kv_copies
        kv_count = size // shape.num_kv_copies
        parts = {}
        if self.q_norm is not None and self.k_norm is not None:
            of_all = shape.norms_all_heads
            parts["q_norm.weight"] = TensorPart(self.q_norm, 0, *((rank, size) if of_all else ()))
            parts["k_norm.weight"] = TensorPart(self.k_norm, 0, *((kv_index, kv_count) if of_all else ()))
        for kind, qkv in self.qkv.named_parameters():
            if shape.joined_qkv:
                of_keys = Section(shape.kv_size, kv_index, kv_count)
                of_values = Section(shape.values_size, kv_index, kv_count)
                sections = (Section(self.queries_size, rank, size), of_keys, of_values)
                part = TensorPart(qkv) if size == 1 else SectionedPart.of(qkv, sections)
                parts[f"qkv_proj.{kind}"] = part
                continue
            q, k, v = torch.split(qkv, [self.queries_size, shape.kv_size, shape.values_size])
            parts[f"q_proj.{kind}"] = TensorPart(q, 0, rank, size)
            parts[f"k_proj.{kind}"] = TensorPart(k, 0, kv_index, kv_count)
            parts[f"v_proj.{kind}"] = TensorPart(v, 0, kv_index, kv_count)
        if self.head_gate is not None:
            parts["g_proj.weight"] = TensorPart(self.head_gate.weight, 0, rank, size)
        if self.sinks is not None:
            parts["sinks"] = TensorPart(self.sinks, 0, rank, size)
        parts["o_proj.weight"] = TensorPart(self.output.weight, 1, rank, size)
        if self.output.bias is not None:
            parts["o_proj.bias"] = TensorPart(self.output.bias)
        return parts
