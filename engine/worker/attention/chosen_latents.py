"""Attention over few of a sequence's latents, those that an indexer chooses for each query (DeepSeek Sparse
Attention, arXiv:2512.02556, section 2.1), in plain torch for any device.

The indexer's key of a token is behind its latent, in the same vector of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.nn.functional import relu, scaled_dot_product_attention

GATHERED_NUMBERS = 2**24
"""The most numbers of chosen latents that are in memory at once."""
SCORED_NUMBERS = 2**24
"""The most scores of the indexer, of all its heads, that are in memory at once."""


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """The indexer's part of each query token of a step."""

    queries: torch.Tensor
    """[num_tokens, index_heads, index_dim]"""
    weights: torch.Tensor
    """[num_tokens, index_heads] fp32: of each head's scores."""

    def of_tokens(self, start: int, end: int) -> IndexQueries:
        return IndexQueries(self.queries[start:end], self.weights[start:end])


@dataclass(frozen=True, slots=True)
class LatentChoice:
    """How a layer chooses the latents that each query attends to."""

    top_k: int
    """The number of tokens that are chosen; sequences with no more attend to all of theirs."""
    index_dim: int
    """The size of the indexer's key, the last numbers of a latent in the cache."""
    own: IndexQueries | None
    """None: the layer attends to what the layer before it has chosen."""


@dataclass(frozen=True, slots=True)
class LatentSequence:
    """The query tokens ``start`` to ``end`` of a step, the last ones of one sequence."""

    start: int
    end: int
    seq_len: int
    """Tokens in the KV after the step; on a GPU, an upper bound."""
    blocks: torch.Tensor
    """[num_blocks]: of the sequence."""
    positions: torch.Tensor
    """[end - start]"""


@dataclass(slots=True)
class ChosenTokens:
    """What the last indexer of a step has chosen, by the first query token of each sequence's part; layers
    without an indexer use it again."""

    by_token: dict[int, torch.Tensor] = field(default_factory=dict)

    def of_layer(
        self, choice: LatentChoice, first_token: int, keys: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The tokens that each query attends to, chosen by this layer or one before it.

        ``first_token``: the number of the first query token in the step. keys [seq_len, index_dim] of the
        sequence; positions [num_queries] -> [num_queries, at most ``choice.top_k``]
        """
        if choice.own is not None:
            queries = choice.own.of_tokens(first_token, first_token + len(positions))
            self.by_token[first_token] = chosen_tokens(queries, keys, positions, choice.top_k)
        return self.by_token[first_token]


def attend_sequences(
    output: torch.Tensor,
    cache: torch.Tensor,
    sequences: Iterable[LatentSequence],
    query: torch.Tensor,
    choice: LatentChoice,
    last: ChosenTokens,
    *,
    value_size: int,
    scale: float,
    kv_scale: float = 1.0,
) -> None:
    """Write the attention of these sequences to the first ``value_size`` numbers of their rows of output; see
    ``AttentionBackend.attend_latent``. The step's latents are already in the cache. ``kv_scale``: of 8-bit
    latents.

    output [num_tokens, num_heads, at least value_size]; cache [pool blocks, block_size, 1, latent_size];
    query [num_tokens, num_heads, latent_size]
    """
    own = query.shape[2] - choice.index_dim
    for each in sequences:
        part = slice(each.start, each.end)
        rows = cache[each.blocks].flatten(0, 2)[: each.seq_len]
        chosen = last.of_layer(choice, each.start, rows[:, own:], each.positions)
        latents = rows[:, :own]
        if latents.dtype != query.dtype:
            latents = (latents.float() * kv_scale).to(query.dtype)
        output[part, :, :value_size] = attend_chosen(
            query[part, :, :own], latents, chosen, each.positions, value_size=value_size, scale=scale
        )


def chosen_tokens(
    index: IndexQueries, keys: torch.Tensor, positions: torch.Tensor, top_k: int
) -> torch.Tensor:
    """The tokens with the highest scores among those up to each query's position, in any order; later ones
    only where there are no others.

    keys [seq_len, index_dim]; positions [num_queries] -> [num_queries, min(top_k, seq_len)]
    """
    num_queries, num_heads, index_dim = index.queries.shape
    seq_len = len(keys)
    transposed = keys.float().t()
    places = torch.arange(seq_len, device=keys.device)
    tile = max(1, SCORED_NUMBERS // (num_heads * seq_len))
    chosen = []
    for start in range(0, num_queries, tile):
        part = slice(start, min(start + tile, num_queries))
        scores = relu((index.queries[part].float() @ transposed) * index_dim**-0.5)
        totals = (index.weights[part, None] @ scores)[:, 0]
        totals = totals.masked_fill_(places > positions[part, None], -torch.inf)
        chosen.append(totals.topk(min(top_k, seq_len), sorted=False).indices)
    return torch.cat(chosen)


def attend_chosen(
    query: torch.Tensor,
    latents: torch.Tensor,
    chosen: torch.Tensor,
    positions: torch.Tensor,
    *,
    value_size: int,
    scale: float,
) -> torch.Tensor:
    """Attention of each query to its chosen latents up to its position.

    query [num_queries, num_heads, latent_size]; latents [seq_len, latent_size]; chosen [num_queries, count];
    positions [num_queries] -> [num_queries, num_heads, value_size]
    """
    output = query.new_empty((*query.shape[:2], value_size))
    tile = max(1, GATHERED_NUMBERS // (chosen.shape[1] * latents.shape[1]))
    for start in range(0, len(query), tile):
        part = slice(start, min(start + tile, len(query)))
        last = positions[part, None]
        # Behind a sequence's end another's numbers may be, whose NaN a weight of 0 would not cancel.
        keys = latents[torch.minimum(chosen[part], last)][:, None]
        seen = (chosen[part] <= last)[:, None, None]
        # Values are whole latents: torch's kernels need them shaped like keys.
        attended = scaled_dot_product_attention(query[part][:, None], keys, keys, attn_mask=seen, scale=scale)
        output[part] = attended[:, 0, :, :value_size]
    return output
