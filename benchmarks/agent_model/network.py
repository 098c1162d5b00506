"""A Qwen3-shaped decoder in plain PyTorch, for training: computes a shared prefix once per batch.

Its parameters have the names of Qwen3's own checkpoints, so that any loader of Qwen3 reads them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

PIECE = 256
"""Queries that are computed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """Sizes, named as in the model's config.json."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 4096

    def config(self) -> dict[str, object]:
        """Returns the fields for a Qwen3 config.json."""
        return asdict(self)


class Network(nn.Module):
    """The decoder; its output matrix is the embedding."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)

    def forward(self, tokens: Tensor, prefix: Tensor | None) -> Tensor:
        """Hidden states [batch, length, hidden] of tokens [batch, length] after a prefix [P]."""
        hidden: Tensor = self.model(tokens, prefix)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden states [..., hidden]."""
        return functional.linear(hidden, self.model.embed_tokens.weight)


class Decoder(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self._turns: Tensor
        self.register_buffer("_turns", _turns(shape), persistent=False)

    def attention(self, layer: int) -> Attention:
        """Returns the attention of one layer, counted from 0."""
        found = self.layers[layer]
        assert isinstance(found, Layer)
        return found.self_attn

    def forward(self, tokens: Tensor, prefix: Tensor | None) -> Tensor:
        own = self.embed_tokens(tokens)
        shared = None if prefix is None else self.embed_tokens(prefix[None])
        for layer in self.layers:
            own, shared = layer(own, shared, self._turns)
        normed: Tensor = self.norm(own)
        return normed


class Layer(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, own: Tensor, shared: Tensor | None, turns: Tensor) -> tuple[Tensor, Tensor | None]:
        """Computes one layer of both parts; the shared one, [1, P, hidden], only once for the whole batch."""
        normed = None if shared is None else self.input_layernorm(shared)
        attended, attended_shared = self.self_attn(self.input_layernorm(own), normed, turns)
        own = own + attended
        own = own + self.mlp(self.post_attention_layernorm(own))
        if shared is not None:
            shared = shared + attended_shared
            shared = shared + self.mlp(self.post_attention_layernorm(shared))
        return own, shared


class Attention(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self._heads = shape.num_attention_heads
        self._kv_heads = shape.num_key_value_heads
        self._head_dim = shape.head_dim
        width = self._heads * shape.head_dim
        kv_width = self._kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def forward(self, own: Tensor, shared: Tensor | None, turns: Tensor) -> tuple[Tensor, Tensor | None]:
        if shared is None:
            return self._attend(*self._parts(own, turns)), None
        start = shared.shape[1]
        q_shared, k_shared, v_shared = self._parts(shared, turns)
        q, k, v = self._parts(own, turns[:, start:])
        batch = own.shape[0]
        k = torch.cat([k_shared.expand(batch, -1, -1, -1), k], dim=2)
        v = torch.cat([v_shared.expand(batch, -1, -1, -1), v], dim=2)
        return self._attend(q, k, v), self._attend(q_shared, k_shared, v_shared)

    def _parts(self, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values [batch, heads, length, head_dim], the first two with rotary embedding."""
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self._heads, self._head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, self._kv_heads, self._head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self._kv_heads, self._head_dim).transpose(1, 2)
        cos, sin = turns[:, :length]
        q = _turned(q, cos, sin)
        k = _turned(k, cos, sin)
        repeat = self._heads // self._kv_heads
        return q.to(v.dtype), _repeated(k.to(v.dtype), repeat), _repeated(v, repeat)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = causal_attention(q, k, v)
        batch, _, length, _ = mixed.shape
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return projected


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √d) v of [batch, heads, length, d], whose last key is that of the last query.

    Computes pieces of the queries, so that little of what they do not see is computed: forward and backward
    this is faster on a CPU than ``scaled_dot_product_attention``, for conversations as short as these.
    """
    batch, heads, length, size = q.shape
    start = k.shape[2] - length
    q = q.flatten(0, 1)
    k = k.flatten(0, 1)
    v = v.flatten(0, 1)
    pieces = []
    for first in range(0, length, PIECE):
        end = min(first + PIECE, length)
        seen = start + end
        unseen = q.new_full((end - first, seen), -torch.inf).triu(start + first + 1)
        scores = torch.baddbmm(unseen, q[:, first:end], k[:, :seen].mT, alpha=size**-0.5)
        pieces.append(torch.bmm(scores.softmax(-1), v[:, :seen]))
    return torch.cat(pieces, dim=1).view(batch, heads, length, size)


class FeedForward(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


def _turns(shape: NetworkShape) -> Tensor:
    """Cosines and sines of the rotary embedding (arXiv 2104.09864): [2, positions, head_dim]."""
    powers = torch.arange(0, shape.head_dim, 2) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_position_embeddings), shape.rope_theta**-powers)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()])


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _repeated(x: Tensor, times: int) -> Tensor:
    """Repeats each key-value head for the query heads that share it."""
    return x if times == 1 else x.repeat_interleave(times, dim=1)
