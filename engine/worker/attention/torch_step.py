"""A step in the form that plain torch attends: groups of decodes, chunks of prompts, and their pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.worker.attention.backend import AttentionBatch, IntArray
from engine.worker.attention.chosen_latents import LatentSequence
from engine.worker.attention.reach import EVERYTHING, Reach

MAX_GATHERED_TOKENS = 65536
"""Maximum KV tokens of one layer that a group of decodes gathers from the pool."""
MAX_PADDING_RATIO = 1.5
"""Maximum ratio of padded to real tokens in a group of decodes."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes ``start`` to ``end`` of the batch that see nearly the same number of tokens, each counted from
    the first page that its sequence sees."""

    start: int
    end: int
    max_len: int
    blocks: torch.Tensor
    """[(end - start) * num_blocks_each]"""
    padding: torch.Tensor
    """[num_padded] indices of gathered tokens that are past the end of a sequence."""
    mask: torch.Tensor | None
    """[end - start, 1, 1, max_len], True where a key is attended; None: all keys."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several query tokens of one sequence: tokens ``start`` to ``end`` of the batch. ``length`` counts from
    the first page that the first of them sees."""

    start: int
    end: int
    length: int
    blocks: torch.Tensor
    """[num_blocks]"""
    num_before: int
    """Tokens of the sequence before that page."""
    sees_only_itself: bool
    """Whether every token sees all tokens of the chunk before it, and no others."""


class TorchStep:
    """A step of one KV cache group."""

    def __init__(self, batch: AttentionBatch, block_size: int, device: torch.device) -> None:
        self._batch = batch
        self._block_size = block_size
        self._device = device
        self.longest = int(batch.seq_lens.max(initial=0))
        self.slot_blocks = self._to_device(batch.slot_blocks)
        self.slot_offsets = self._to_device(batch.slot_offsets)
        self._seen: dict[Reach, tuple[list[DecodeGroup], list[Chunk]]] = {}
        self._alone: list[LatentSequence] | None = None

    def seen(self, reach: Reach) -> tuple[list[DecodeGroup], list[Chunk]]:
        """The groups and chunks for this reach; layers share them."""
        if reach.first_seen(self.longest - 1) <= 0:
            reach = EVERYTHING
        if reach not in self._seen:
            self._seen[reach] = list(self._decode_groups(reach)), list(self._chunks(reach))
        return self._seen[reach]

    def all_sequences(self) -> list[LatentSequence]:
        """Every sequence by itself; layers share them."""
        if self._alone is None:
            self._alone = list(latent_sequences(self._batch, self._block_size, self._device))
        return self._alone

    def _decode_groups(self, reach: Reach) -> Iterator[DecodeGroup]:
        seq_lens = self._batch.seq_lens[: self._batch.num_decodes]
        firsts = np.maximum(reach.first_seen(seq_lens - 1), 0)
        pages = firsts // self._block_size
        before = pages * self._block_size
        firsts = firsts - before
        lengths = seq_lens - before
        for start, end in _similar_lengths(lengths.tolist()):
            yield self._decode_group(start, end, pages[start:end], firsts[start:end], lengths[start:end])

    def _decode_group(
        self, start: int, end: int, pages: IntArray, firsts: IntArray, lengths: IntArray
    ) -> DecodeGroup:
        """pages, firsts, lengths [end - start]: the first page and the first token that each sequence sees,
        and its number of tokens, counted from that page."""
        longest = int(lengths.max())
        blocks_each = self._num_pages(longest)
        columns = pages[:, None] + np.arange(blocks_each)
        tables = self._batch.block_tables[start:end]
        blocks = np.take_along_axis(tables, np.minimum(columns, tables.shape[1] - 1), axis=1)
        return DecodeGroup(
            start=start,
            end=end,
            max_len=longest,
            blocks=self._to_device(blocks.reshape(-1)),
            padding=self._to_device(self._padding(lengths, longest)),
            mask=self._decode_mask(firsts, lengths, longest),
        )

    def _padding(self, lengths: IntArray, longest: int) -> IntArray:
        """See ``DecodeGroup.padding``."""
        width = self._num_pages(longest) * self._block_size
        return np.concatenate(
            [np.arange(row * width + n, row * width + longest) for row, n in enumerate(lengths.tolist())]
        )

    def _decode_mask(self, firsts: IntArray, lengths: IntArray, longest: int) -> torch.Tensor | None:
        if not firsts.any() and int(lengths.min()) == longest:
            return None
        keys = np.arange(longest)
        seen = (keys >= firsts[:, None]) & (keys < lengths[:, None])
        return torch.from_numpy(seen).to(self._device, non_blocking=True)[:, None, None, :]

    def _chunks(self, reach: Reach) -> Iterator[Chunk]:
        batch = self._batch
        first = self._batch.num_decodes
        contexts = batch.seq_lens - batch.query_lens
        pages = np.maximum(reach.first_seen(contexts), 0) // self._block_size
        token = first
        for row in range(first, len(batch.query_lens)):
            query_len = int(batch.query_lens[row])
            seq_len = int(batch.seq_lens[row])
            page = int(pages[row])
            blocks = batch.block_tables[row, page : self._num_pages(seq_len)]
            yield Chunk(
                start=token,
                end=token + query_len,
                length=seq_len - page * self._block_size,
                blocks=self._to_device(blocks),
                num_before=page * self._block_size,
                sees_only_itself=query_len == seq_len and reach.first_seen(seq_len - 1) <= 0,
            )
            token += query_len

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def latent_sequences(
    batch: AttentionBatch, block_size: int, device: torch.device
) -> Iterator[LatentSequence]:
    """The sequences of a step of one KV cache group, in order."""
    token = 0
    for row, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        blocks = batch.block_tables[row, : -(-seq_len // block_size)]
        yield LatentSequence(
            start=token,
            end=token + int(query_len),
            seq_len=int(seq_len),
            blocks=torch.from_numpy(blocks).to(device, non_blocking=True),
            positions=torch.arange(seq_len - query_len, seq_len, device=device),
        )
        token += int(query_len)


def _similar_lengths(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Split sequences into groups that need little padding and fit in the gather buffer; the fewest groups if
    the lengths ascend."""
    start = 0
    real = 0
    longest = 0
    for i, length in enumerate(lengths):
        longest = max(longest, length)
        padded = longest * (i + 1 - start)
        if i > start and (padded > MAX_GATHERED_TOKENS or padded > MAX_PADDING_RATIO * (real + length)):
            yield start, i
            start = i
            real = 0
            longest = length
        real += length
    if lengths:
        yield start, len(lengths)
