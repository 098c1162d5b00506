"""Paged attention in plain torch, for any device: gather the pages, then scaled_dot_product_attention.

Decodes of similar length are batched; a prompt chunk runs alone, in tiles of queries. Only the pages that the
queries of a layer see are gathered: the others may hold another sequence's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.worker.attention.backend import AttentionBatch
from engine.worker.attention.chosen_latents import ChosenTokens, LatentChoice, attend_sequences
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.attention.layer_places import LayerPlaces, one_table
from engine.worker.attention.reach import EVERYTHING, Reach
from engine.worker.attention.torch_step import MAX_GATHERED_TOKENS, DecodeGroup, TorchStep

PACKED_QUERIES = 1024
"""Queries times heads per KV head that share one mask: limits the mask's size for any context length."""
SCORED_QUERIES = 128
"""The same limit where all scores are in memory, because they are capped or there are sinks."""


@dataclass(frozen=True, slots=True)
class _Scoring:
    """How a layer computes weights from Q·K; see ``AttentionBackend.attend``."""

    scale: float
    soft_cap: float | None
    sinks: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """Whether ``scaled_dot_product_attention`` supports it."""
        return self.soft_cap is None and self.sinks is None


class TorchPagedAttention:
    """An AttentionBackend over a pool [num_blocks, num_slots, num_vectors, block_size, num_kv_heads,
    head_dim]."""

    def __init__(self, pool: torch.Tensor, places: LayerPlaces | None = None) -> None:
        """``places``: by default, the layers are one KV cache group."""
        self._pool = pool
        self._places = one_table(pool.shape[1]) if places is None else places
        self._steps: list[TorchStep] = []
        self._chosen = ChosenTokens()
        # Kept between calls: on a CPU, faulting in fresh memory of this size costs eight times the copy
        # itself.
        self._gathered_keys = pool.new_empty((0, *pool.shape[3:]))
        self._gathered_values = self._gathered_keys

    @staticmethod
    def scratch_bytes(spec: KvCacheSpec, max_model_len: int) -> int:
        """Bytes of gathered pages and masks for the longest sequence, in addition to the model's
        activations."""
        longest = max(max_model_len, MAX_GATHERED_TOKENS)
        gathered = spec.num_vectors * longest * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
        masks = PACKED_QUERIES * max_model_len * (1 + spec.dtype.itemsize)
        return gathered + masks

    def begin_step(self, batch: AttentionBatch) -> None:
        block_size = self._pool.shape[3]
        device = self._pool.device
        self._steps = [TorchStep(of_group, block_size, device) for of_group in batch.by_group]
        self._chosen = ChosenTokens()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        group, slot, _ = self._places[layer]
        step = self._steps[group]
        caches = (self._pool[:, slot, 0], self._pool[:, slot, 1])
        for cache, new in zip(caches, (key, value), strict=True):
            cache[step.slot_blocks, step.slot_offsets] = new
        scoring = _Scoring(scale, soft_cap, sinks)
        return self._attend_written(step, caches, query, (key, value), scoring, Reach(window, chunk))

    def attend_latent(
        self,
        layer: int,
        query: torch.Tensor,
        latent: torch.Tensor,
        *,
        value_size: int,
        scale: float,
        choice: LatentChoice | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend. Values are whole latents here: torch's kernels need them shaped like keys."""
        group, slot, _ = self._places[layer]
        step = self._steps[group]
        cache = self._pool[:, slot, 0]
        latent = latent[:, None]
        cache[step.slot_blocks, step.slot_offsets] = latent
        if choice is not None and step.longest > choice.top_k:
            sequences = step.all_sequences()
            output = query.new_empty((*query.shape[:2], value_size))
            attend_sequences(
                output, cache, sequences, query, choice, self._chosen, value_size=value_size, scale=scale
            )
            return output
        scoring = _Scoring(scale, None, None)
        output = self._attend_written(step, (cache, cache), query, (latent, latent), scoring, EVERYTHING)
        return output[..., :value_size]

    def _attend_written(
        self,
        step: TorchStep,
        caches: tuple[torch.Tensor, torch.Tensor],
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        scoring: _Scoring,
        reach: Reach,
    ) -> torch.Tensor:
        """The result of ``attend``. caches: the pages of keys and values, or those of latents twice; new: the
        key and the value of the step, already written to the pages."""
        output = torch.empty_like(query)
        decodes, prompts = step.seen(reach)
        for decode in decodes:
            pages = self._gather(
                caches, decode.blocks, decode.end - decode.start, decode.max_len, decode.padding
            )
            _attend_decodes(query[decode.start : decode.end], *pages, output, decode, scoring)
        for some in prompts:
            part = slice(some.start, some.end)
            if some.sees_only_itself and scoring.is_plain:
                output[part] = _attend_causal(query[part], new[0][part], new[1][part], scoring.scale)
            else:
                pages = self._gather(caches, some.blocks, 1, some.length)
                _attend_tiles(query[part], *pages, output[part], scoring, reach, some.num_before)
        return output

    def _gather(
        self,
        caches: tuple[torch.Tensor, torch.Tensor],
        blocks: torch.Tensor,
        num_seqs: int,
        seq_len: int,
        padding: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the first ``seq_len`` tokens of ``num_seqs`` sequences from one layer's pages. Set tokens at
        ``padding`` to 0: they may hold another sequence's NaN, which a weight of 0 would not cancel.

        caches: keys and values, or twice the same, [pool blocks, block_size, heads, head_dim] -> both
        [num_seqs, heads, seq_len, head_dim]
        """
        num_blocks = blocks.shape[0]
        if num_blocks > self._gathered_keys.shape[0]:
            self._gathered_keys = self._pool.new_empty((num_blocks, *self._pool.shape[3:]))
            if self._pool.shape[2] > 1:
                self._gathered_values = torch.empty_like(self._gathered_keys)
        pages = []
        buffers = self._gathered_keys, self._gathered_values
        for cache, buffer in list(zip(caches, buffers, strict=True))[: self._pool.shape[2]]:
            page = torch.index_select(cache, 0, blocks, out=buffer[:num_blocks])
            if padding is not None and len(padding):
                page.view(-1, *page.shape[2:]).index_fill_(0, padding, 0)
            flat = page.view(num_seqs, -1, *page.shape[2:])
            pages.append(flat[:, :seq_len].transpose(1, 2))
        return pages[0], pages[-1]


def _attend_decodes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    decode: DecodeGroup,
    scoring: _Scoring,
) -> None:
    """Attend with one query per sequence. Heads that share a KV head become its queries, so KV is not
    repeated.

    query [num_seqs, heads, head_dim]; key, value [num_seqs, kv_heads, seq_len, head_dim];
    output [num_tokens, heads, head_dim] of the whole step
    """
    grouped = query.view(len(query), key.shape[1], -1, query.shape[2])
    attended = _attend(grouped, key, value, decode.mask, scoring)
    output[decode.start : decode.end] = attended.flatten(1, 2)


def _attend_causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend within a sequence that has no context: it sees only its own K and V. All tensors are [tokens,
    heads, head_dim]."""
    output = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        is_causal=True,
        scale=scale,
        enable_gqa=True,
    )
    return output[0].transpose(0, 1)


def _attend_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    scoring: _Scoring,
    reach: Reach,
    num_before: int,
) -> None:
    """Attend with a chunk that has context: tiles of queries, each over the keys that its last query sees.

    As with decodes, the heads of a group become queries of their KV head, so KV is not repeated and any
    kernel works.

    query, output [tokens, heads, head_dim]; key, value [1, kv_heads, seq_len, head_dim], without the
    ``num_before`` first tokens of the sequence
    """
    num_queries = query.shape[0]
    seq_len = key.shape[2]
    num_kv_heads = key.shape[1]
    group_size = query.shape[1] // num_kv_heads
    tile_size = max(1, (PACKED_QUERIES if scoring.is_plain else SCORED_QUERIES) // group_size)
    context = seq_len - num_queries
    positions = torch.arange(num_before, num_before + seq_len, device=query.device)
    for start in range(0, num_queries, tile_size):
        end = min(start + tile_size, num_queries)
        first = max(0, reach.first_seen(num_before + context + start) - num_before)
        last = context + end
        queries = positions[context + start : last, None]
        seen = positions[first:last] <= queries
        if reach != EVERYTHING:
            seen &= positions[first:last] >= reach.first_seen(queries)
        packed = query[start:end].view(end - start, num_kv_heads, group_size, -1).permute(1, 2, 0, 3)
        attended = _attend(
            packed.flatten(1, 2)[None],
            key[:, :, first:last],
            value[:, :, first:last],
            seen.repeat(group_size, 1),
            scoring,
        )
        unpacked = attended[0].view(packed.shape).permute(2, 0, 1, 3)
        output[start:end] = unpacked.flatten(1, 2)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: _Scoring
) -> torch.Tensor:
    """query [num_seqs, kv_heads, rows, head_dim], rows of one query head together; key, value [num_seqs,
    kv_heads, seq_len, head_dim]; mask: True where a key is attended, None: everywhere. Result like query."""
    if scoring.is_plain:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scoring.scale)
    scores = (query.float() @ key.float().transpose(2, 3)) * scoring.scale
    if scoring.soft_cap is not None:
        scores = (scores / scoring.soft_cap).tanh_() * scoring.soft_cap
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf)
    log_sums = scores.logsumexp(dim=-1, keepdim=True)
    if scoring.sinks is not None:
        log_sums = torch.logaddexp(log_sums, _of_rows(scoring.sinks, query))
    weights = (scores - log_sums).exp_()
    return (weights @ value.float()).to(query.dtype)


def _of_rows(sinks: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """sinks [num_heads] -> the sink of each row of a query [num_seqs, kv_heads, rows, head_dim]: [kv_heads,
    rows, 1]"""
    of_heads = sinks.float().view(query.shape[1], -1)
    return of_heads.repeat_interleave(query.shape[2] // of_heads.shape[1], dim=1)[..., None]
