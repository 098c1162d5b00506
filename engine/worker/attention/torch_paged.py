"""Paged attention in plain torch, for any device: gather the pages, then scaled_dot_product_attention.

Decodes of similar length go together; a prompt chunk goes alone, in tiles of queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.worker.attention.backend import AttentionBatch, IntArray
from engine.worker.attention.kv_cache import KvCacheSpec

MAX_GATHERED_TOKENS = 65536
"""Maximum KV tokens of one layer that a group of decodes gathers from the pool."""
MAX_PADDING_RATIO = 1.5
"""Maximum ratio of padded to real tokens in a group of decodes."""
PACKED_QUERIES = 1024
"""Queries times heads per KV head that share one mask: it stays small for any context length."""


@dataclass(slots=True)
class _DecodeGroup:
    """Decodes ``start`` to ``end`` of the batch, of nearly the same length."""

    start: int
    end: int
    max_seq_len: int
    blocks: torch.Tensor
    """[(end - start) * num_blocks_each]"""
    seq_lens: torch.Tensor
    padding: torch.Tensor
    """[num_padded] indices among the gathered tokens that lie past the end of a sequence."""
    uniform: bool
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)
    """Masks by window, [end - start, 1, 1, max_seq_len], True where a key is attended; shared by the
    layers."""

    def mask(self, window: int | None) -> torch.Tensor | None:
        if window not in self.masks:
            self.masks[window] = self._make_mask(window)
        return self.masks[window]

    def _make_mask(self, window: int | None) -> torch.Tensor | None:
        windowed = window is not None and window < self.max_seq_len
        if self.uniform and not windowed:
            return None
        keys = torch.arange(self.max_seq_len, device=self.seq_lens.device)
        ends = self.seq_lens[:, None]
        seen = keys < ends
        if windowed and window is not None:
            seen &= keys >= ends - window
        return seen[:, None, None, :]


@dataclass(slots=True)
class _Chunk:
    """Several query tokens of one sequence: tokens ``start`` to ``end`` of the batch."""

    start: int
    end: int
    seq_len: int
    blocks: torch.Tensor
    """[num_blocks]; unused if the sequence starts in this step."""


class TorchPagedAttention:
    """An AttentionBackend over a pool [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool
        self._block_size = pool.shape[3]
        self._groups: list[_DecodeGroup] = []
        self._chunks: list[_Chunk] = []
        self._slot_blocks = torch.empty(0, dtype=torch.int64)
        self._slot_offsets = torch.empty(0, dtype=torch.int64)
        # Kept between calls: on a CPU, faulting in fresh memory of this size costs eight times the copy
        # itself.
        self._gathered_keys = pool.new_empty((0, *pool.shape[3:]))
        self._gathered_values = self._gathered_keys

    @staticmethod
    def scratch_bytes(spec: KvCacheSpec, max_model_len: int) -> int:
        """Bytes of gathered pages and masks for the longest sequence, in addition to the model's
        activations."""
        longest = max(max_model_len, MAX_GATHERED_TOKENS)
        gathered = 2 * longest * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
        masks = PACKED_QUERIES * max_model_len * (1 + spec.dtype.itemsize)
        return gathered + masks

    def begin_step(self, batch: AttentionBatch) -> None:
        self._slot_blocks = self._to_device(batch.slot_blocks)
        self._slot_offsets = self._to_device(batch.slot_offsets)
        self._groups = [
            self._decode_group(batch, start, end)
            for start, end in _similar_lengths(batch.seq_lens[: batch.num_decodes].tolist())
        ]
        self._chunks = []
        token = batch.num_decodes
        for row in range(batch.num_decodes, len(batch.query_lens)):
            query_len, seq_len = int(batch.query_lens[row]), int(batch.seq_lens[row])
            blocks = self._blocks_of(batch, row, row + 1, seq_len)
            self._chunks.append(_Chunk(token, token + query_len, seq_len, blocks))
            token += query_len

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = self._pool[:, layer, 0], self._pool[:, layer, 1]
        keys[self._slot_blocks, self._slot_offsets] = key
        values[self._slot_blocks, self._slot_offsets] = value
        output = torch.empty_like(query)
        for group in self._groups:
            pages = self._gather(
                keys, values, group.blocks, group.end - group.start, group.max_seq_len, group.padding
            )
            _attend_decodes(query[group.start : group.end], *pages, output, group, scale, window)
        for chunk in self._chunks:
            part = slice(chunk.start, chunk.end)
            fresh = chunk.end - chunk.start == chunk.seq_len
            if fresh and (window is None or window >= chunk.seq_len):
                output[part] = _attend_causal(query[part], key[part], value[part], scale)
            else:
                pages = self._gather(keys, values, chunk.blocks, 1, chunk.seq_len)
                _attend_tiles(query[part], *pages, output[part], scale, window)
        return output

    def _gather(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        blocks: torch.Tensor,
        num_seqs: int,
        seq_len: int,
        padding: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the first ``seq_len`` tokens of ``num_seqs`` sequences from one layer's pages. Tokens at
        ``padding`` become 0: they may hold another sequence's NaN, which a weight of 0 would not cancel.

        keys, values [pool blocks, block_size, heads, head_dim] -> both [num_seqs, heads, seq_len, head_dim]
        """
        num_blocks = blocks.shape[0]
        if num_blocks > self._gathered_keys.shape[0]:
            self._gathered_keys = self._pool.new_empty((num_blocks, *self._pool.shape[3:]))
            self._gathered_values = torch.empty_like(self._gathered_keys)
        pages = []
        for cache, buffer in ((keys, self._gathered_keys), (values, self._gathered_values)):
            page = torch.index_select(cache, 0, blocks, out=buffer[:num_blocks])
            if padding is not None and len(padding):
                page.view(-1, *page.shape[2:]).index_fill_(0, padding, 0)
            flat = page.view(num_seqs, -1, *page.shape[2:])
            pages.append(flat[:, :seq_len].transpose(1, 2))
        return pages[0], pages[1]

    def _decode_group(self, batch: AttentionBatch, start: int, end: int) -> _DecodeGroup:
        seq_lens = batch.seq_lens[start:end]
        longest = int(seq_lens[-1])
        return _DecodeGroup(
            start=start,
            end=end,
            max_seq_len=longest,
            blocks=self._blocks_of(batch, start, end, longest),
            seq_lens=self._to_device(seq_lens),
            padding=self._to_device(self._padding(seq_lens)),
            uniform=int(seq_lens[0]) == longest,
        )

    def _padding(self, seq_lens: IntArray) -> IntArray:
        """See ``_DecodeGroup.padding``."""
        longest = int(seq_lens[-1])
        width = -(-longest // self._block_size) * self._block_size
        return np.concatenate(
            [
                np.arange(row * width + length, row * width + longest)
                for row, length in enumerate(seq_lens.tolist())
            ]
        )

    def _blocks_of(self, batch: AttentionBatch, start: int, end: int, seq_len: int) -> torch.Tensor:
        num_blocks = -(-seq_len // self._block_size)
        return self._to_device(batch.block_tables[start:end, :num_blocks].reshape(-1))

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._pool.device, non_blocking=True)


def _similar_lengths(seq_lens: list[int]) -> Iterator[tuple[int, int]]:
    """Split ascending lengths into groups that waste little when padded and fit in the gather buffer."""
    start, real = 0, 0
    for i, length in enumerate(seq_lens):
        padded = length * (i + 1 - start)
        if i > start and (padded > MAX_GATHERED_TOKENS or padded > MAX_PADDING_RATIO * (real + length)):
            yield start, i
            start, real = i, 0
        real += length
    if seq_lens:
        yield start, len(seq_lens)


def _attend_decodes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    group: _DecodeGroup,
    scale: float,
    window: int | None,
) -> None:
    """Attend with one query per sequence. The heads that share a KV head become its queries, so KV is not
    repeated.

    query [num_seqs, heads, head_dim]; key, value [num_seqs, kv_heads, seq_len, head_dim];
    output [num_tokens, heads, head_dim] of the whole step
    """
    grouped = query.view(len(query), key.shape[1], -1, query.shape[2])
    attended = scaled_dot_product_attention(grouped, key, value, attn_mask=group.mask(window), scale=scale)
    output[group.start : group.end] = attended.flatten(1, 2)


def _attend_causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend within a sequence that has no context: its own K and V are all there is. All tensors are
    [tokens, heads, head_dim]."""
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
    scale: float,
    window: int | None,
) -> None:
    """Attend with a chunk that has context: tiles of queries, each over the keys that its last query sees.

    As with decodes, the heads of a group become queries of their KV head: KV is not repeated, and any kernel
    works.

    query, output [tokens, heads, head_dim]; key, value [1, kv_heads, seq_len, head_dim]
    """
    num_queries, seq_len, num_kv_heads = query.shape[0], key.shape[2], key.shape[1]
    group_size = query.shape[1] // num_kv_heads
    tile_size = max(1, PACKED_QUERIES // group_size)
    context = seq_len - num_queries
    positions = torch.arange(seq_len, device=query.device)
    for start in range(0, num_queries, tile_size):
        end = min(start + tile_size, num_queries)
        first = 0 if window is None else max(0, context + start - window + 1)
        last = context + end
        queries = positions[context + start : last, None]
        seen = positions[first:last] <= queries
        if window is not None:
            seen &= positions[first:last] > queries - window
        packed = query[start:end].view(end - start, num_kv_heads, group_size, -1).permute(1, 2, 0, 3)
        attended = scaled_dot_product_attention(
            packed.flatten(1, 2)[None],
            key[:, :, first:last],
            value[:, :, first:last],
            attn_mask=seen.repeat(group_size, 1),
            scale=scale,
        )
        unpacked = attended[0].view(packed.shape).permute(2, 0, 1, 3)
        output[start:end] = unpacked.flatten(1, 2)
