"""One way to attend prompts: what it is asked, and what it says that it cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import pad

from engine.worker.gpu.step_batch import PromptChunk, StepBatch


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What differs between the attention of one layer and of another."""

    scale: float
    window: int | None
    """A token sees itself and the ``window - 1`` before it."""
    soft_cap: float | None
    """Scores are bent to stay below it: soft_cap * tanh(score / soft_cap)."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Neighbouring prompts of a step, as kernels of variable length ask for them."""

    chunks: tuple[PromptChunk, ...]
    query_starts: torch.Tensor
    """[num_prompts + 1] int32: where the query tokens of each begin, the first at 0."""
    kv_starts: torch.Tensor
    """[num_prompts + 1] int32: where the KV of each begins, were it gathered."""
    seq_lens: torch.Tensor
    """[num_prompts] int32"""
    block_tables: torch.Tensor
    """[num_prompts, max_blocks] int32"""

    @classmethod
    def of(cls, batch: StepBatch, chunks: tuple[PromptChunk, ...]) -> Prompts:
        first, end = chunks[0].seq, chunks[-1].seq + 1
        seq_lens = batch.seq_lens[first:end]
        return cls(
            chunks,
            batch.query_starts[first : end + 1] - batch.query_starts[first],
            pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            seq_lens,
            batch.block_tables.index_select(0, batch.rows[first:end]),
        )

    @property
    def num_tokens(self) -> int:
        return sum(chunk.query_len for chunk in self.chunks)

    @property
    def max_query_len(self) -> int:
        return max(chunk.query_len for chunk in self.chunks)

    @property
    def max_seq_len(self) -> int:
        return max(chunk.seq_len for chunk in self.chunks)


class PromptPath(Protocol):
    """One way to attend prompts."""

    @property
    def name(self) -> str:
        """What a log calls it."""

    def can(self, kind: AttentionKind) -> bool:
        """Whether it computes this kind."""

    def attend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        prompts: Prompts,
        kind: AttentionKind,
    ) -> torch.Tensor:
        """keys, values [num_blocks, block_size, num_kv_heads, head_dim]: one layer's views of the pool;
        query [num_tokens of prompts, num_heads, head_dim]; result like query."""


def groups_within(chunks: tuple[PromptChunk, ...], max_tokens: int) -> Iterator[tuple[PromptChunk, ...]]:
    """Neighbours whose KV together has at most ``max_tokens`` tokens; one that has more stays alone."""
    start, gathered = 0, 0
    for index, chunk in enumerate(chunks):
        if index > start and gathered + chunk.seq_len > max_tokens:
            yield chunks[start:index]
            start, gathered = index, 0
        gathered += chunk.seq_len
    yield chunks[start:]
