"""A decoder's multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): the cache of a token
is one vector for all heads, from which keys and values are linear maps.

The maps are absorbed: a head's query is mapped to the space of latents, and the attended latents are mapped
to the head's values, so that no key and no value of a head is ever computed.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import pad, rms_norm

from engine.worker.attention.backend import AttentionBackend
from engine.worker.attention.chosen_latents import IndexQueries, LatentChoice
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.mixers.latent_indexer import LatentIndexer
from engine.worker.models.rotary import pairs_apart, rotate
from engine.worker.models.shape import DecoderShape, IndexShape, LatentShape

_NORM_EPS = 1e-6
"""Epsilon of the norms of latents, whatever the config says: DeepSeek's code does not pass the config's."""


class LatentAttention(nn.Module):
    """The attention of one layer, or a rank's heads of it; every rank has the whole latents."""

    def __init__(self, shape: DecoderShape, latent: LatentShape, index: int, build: Builder) -> None:
        """``index``: the layer's number."""
        super().__init__()
        self._latent = latent
        self._index = index
        self._grows = shape.query_growth is not None
        self._group = build.group
        self._num_heads = shape.num_heads
        hidden = shape.hidden_size
        rank = latent.q_rank
        self.down = build.linear(hidden, (rank or 0) + latent.own_size, latent.bias)
        """The linear to the query's latent, if there is one, and to the latent of keys and values."""
        self.q_norm = None if rank is None else build.parameter(rank)
        self.kv_norm = build.parameter(latent.kv_rank)
        self.query = build.linear(rank or hidden, shape.num_heads * latent.query_dim, bias=False)
        self.up: nn.Parameter | None = build.parameter(
            shape.num_heads, latent.nope_dim + latent.value_dim, latent.kv_rank
        )
        """Maps of each head from a latent to its key and value, as in a checkpoint; None after loading."""
        self.key_map: nn.Parameter | None = None
        """[num_heads, nope_dim, kv_rank], after loading."""
        self.value_map: nn.Parameter | None = None
        """[num_heads, kv_rank, value_dim], after loading."""
        self.output = build.row_parallel(shape.num_heads * latent.value_dim, hidden, latent.bias)
        has_indexer = latent.index is not None and shape.indexes[index]
        self.indexer = LatentIndexer(hidden, latent, build) if has_indexer else None

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        latent = self._latent
        sizes = [latent.q_rank or 0, latent.kv_rank, latent.rope_dim]
        q, kv, rope = torch.split(self.down(x), sizes, dim=-1)
        q = x if self.q_norm is None else rms_norm(q, q.shape[1:], self.q_norm, _NORM_EPS)
        query = self.query(q)
        kv = rms_norm(kv, self.kv_norm.shape, self.kv_norm, _NORM_EPS)
        factors = None
        if self._grows:
            cos, factors = cos[..., :-1], cos[..., -1:]
        absorbed = self._absorbed(query, cos, sin)
        if factors is not None:
            absorbed = absorbed * factors
        own = [kv, self._rotated(rope[:, None], cos, sin)[:, 0]]
        choice = None
        if latent.index is not None:
            absorbed = pad(absorbed, (0, latent.index.head_dim))
            key, queries = self._indexed(x, q, cos, sin, latent.index)
            own.append(key)
            choice = LatentChoice(latent.index.top_k, latent.index.head_dim, queries)
        attended = attention.attend_latent(
            self._index,
            absorbed,
            torch.cat(own, dim=-1),
            value_size=latent.kv_rank,
            scale=latent.scale,
            choice=choice,
        )
        assert self.value_map is not None, "split_maps() comes first"
        values = torch.bmm(attended.transpose(0, 1), self.value_map)
        output: torch.Tensor = self.output(values.transpose(0, 1).flatten(1))
        return output

    def _indexed(
        self, x: torch.Tensor, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, index: IndexShape
    ) -> tuple[torch.Tensor, IndexQueries | None]:
        """The indexer's keys of x [num_tokens, hidden_size], and its queries; a layer without an indexer has
        none, and keys that nobody reads. q [num_tokens, q_rank]"""
        if self.indexer is None:
            return x.new_zeros((len(x), index.head_dim)), None
        indexer = self.indexer
        return indexer.keys_of(x, cos, sin), indexer.queries_of(x, q, cos, sin)

    def _absorbed(self, query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Map queries to the space of latents, which are their keys. query [num_tokens, num_heads *
        query_dim] -> [num_tokens, num_heads, latent_size]"""
        latent = self._latent
        heads = query.view(len(query), self._num_heads, latent.query_dim)
        nope, rope = torch.split(heads, [latent.nope_dim, latent.rope_dim], dim=-1)
        assert self.key_map is not None, "split_maps() comes first"
        absorbed = torch.bmm(nope.transpose(0, 1), self.key_map)
        return torch.cat((absorbed.transpose(0, 1), self._rotated(rope, cos, sin)), dim=-1)

    def _rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, heads, rope_dim] -> the same shape"""
        pairs = pairs_apart(x, cos.shape[-1]) if self._latent.interleaved else x
        return rotate(pairs, cos, sin)

    def split_maps(self) -> None:
        """Store the loaded maps in the layout in which they are multiplied: torch would copy strided ones in
        each call. ``checkpoint_parts`` is not available afterwards."""
        assert self.up is not None
        key, value = torch.split(self.up, [self._latent.nope_dim, self._latent.value_dim], dim=1)
        self.key_map = nn.Parameter(key.contiguous(), requires_grad=False)
        self.value_map = nn.Parameter(value.transpose(1, 2).contiguous(), requires_grad=False)
        self.up = None

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        rank = self._group.rank
        size = self._group.size
        assert self.up is not None, "no parts after load()"
        parts = {"kv_a_layernorm.weight": TensorPart(self.kv_norm)}
        if self.q_norm is not None:
            parts["q_a_layernorm.weight"] = TensorPart(self.q_norm)
        for kind, down in self.down.named_parameters():
            q, kv = torch.split(down, [self._latent.q_rank or 0, self._latent.own_size])
            parts[f"kv_a_proj_with_mqa.{kind}"] = TensorPart(kv)
            if self.q_norm is not None:
                parts[f"q_a_proj.{kind}"] = TensorPart(q)
        query = "q_proj.weight" if self.q_norm is None else "q_b_proj.weight"
        parts[query] = TensorPart(self.query.weight, 0, rank, size)
        parts["kv_b_proj.weight"] = TensorPart(self.up.flatten(0, 1), 0, rank, size)
        parts["o_proj.weight"] = TensorPart(self.output.weight, 1, rank, size)
        if self.output.bias is not None:
            parts["o_proj.bias"] = TensorPart(self.output.bias)
        if self.indexer is not None:
            own = self.indexer.checkpoint_parts()
            parts |= {f"indexer.{name}": part for name, part in own.items()}
        return parts
