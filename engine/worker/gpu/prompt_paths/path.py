"""The interface of a prefill attention path, and the kinds of attention it may support."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import pad

from engine.worker.gpu.step_batch import PromptChunk, StepBatch


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The attention parameters that differ between layers."""

    scale: float
    window: int | None
    """Sliding window: a token attends to itself and the ``window - 1`` tokens before it."""
    soft_cap: float | None
    """Logit soft capping: soft_cap * tanh(score / soft_cap)."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Consecutive prompts of a step, in the form that varlen kernels take."""

    chunks: tuple[PromptChunk, ...]
    query_starts: torch.Tensor
    """[num_prompts + 1] int32: start of each prompt's query tokens, the first at 0."""
    kv_starts: torch.Tensor
    """[num_prompts + 1] int32: start of each prompt's KV when gathered."""
    seq_lens: torch.Tensor
    """[num_prompts] int32."""
    block_tables: torch.Tensor
    """[num_prompts, max_blocks] int32."""

    @classmethod
    def of(cls, batch: StepBatch, chunks: tuple[PromptChunk, ...]) -> Prompts:
        first = chunks[0].seq
        end = chunks[-1].seq + 1
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
    """A way to compute prefill attention."""

    @property
    def name(self) -> str:
        """The path's name in logs."""

    def can(self, kind: AttentionKind) -> bool:
        """Whether the path supports this kind of attention."""

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
    """Groups of consecutive chunks with at most ``max_tokens`` tokens of KV; a longer chunk is a group."""
    start = 0
    gathered = 0
    for index, chunk in enumerate(chunks):
        if index > start and gathered + chunk.seq_len > max_tokens:
            yield chunks[start:index]
            start = index
            gathered = 0
        gathered += chunk.seq_len
    yield chunks[start:]
