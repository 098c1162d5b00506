"""The sequences of one step on the device: the inputs of kernels and of their launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.worker.attention.backend import IntArray
from engine.worker.request_rows import StepRows

PREFIX_UNIT = 64
"""The length of a shared prefix is a multiple of this, and so of all tile sizes: the prefix ends with a
tile."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A chunk of a prompt in a step, with its lengths on the host."""

    seq: int
    """Index among the sequences of the step."""
    first_token: int
    """Index of the chunk's first token among the tokens of the step."""
    query_len: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that several uniform sequences of a step share, in the same blocks."""

    place: torch.Tensor
    """[2] int32: a row of ``StepBatch.block_tables`` that begins with it, and its length in tokens, a
    multiple of ``PREFIX_UNIT``; 0: there is none."""
    lens: torch.Tensor
    """[num_uniform] int32: the length for sequences that begin with it, 0 for others."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Tokens of all sequences flattened into one axis: first ``num_uniform`` sequences of ``uniform_len``
    query tokens each (1: decode; more: draft tokens to verify), then the prompts.

    All tensors are on the device; no method makes the host wait for it.
    """

    rows: torch.Tensor
    """[num_seqs] int32: the row of ``block_tables`` of each sequence."""
    query_starts: torch.Tensor
    """[num_seqs + 1] int32: start of each sequence's tokens."""
    seq_lens: torch.Tensor
    """[num_seqs] int32: tokens in the KV cache after the step; 0: padding of a CUDA graph."""
    block_tables: torch.Tensor
    """[num_rows, max_blocks] int32: of all requests, not only those of the step."""
    positions: torch.Tensor
    """[num_tokens] int64."""
    slots: torch.Tensor
    """[num_tokens] int64: slot of each token's K and V, block * block_size + offset; -1: not stored."""
    num_uniform: int
    uniform_len: int
    max_uniform_seq_len: int
    """Upper bound of the lengths of uniform sequences; in a CUDA graph, the longest possible."""
    prompts: tuple[PromptChunk, ...] = ()
    """The sequences that follow the uniform ones, in order."""
    prefix: SharedPrefix | None = None
    """Layers that see all tokens attend to it in a separate pass; None: each sequence reads its own KV."""
    other_groups: tuple[StepBatch, ...] = ()
    """The same step with the block tables and slots of the KV cache groups after the first."""

    @property
    def by_group(self) -> tuple[StepBatch, ...]:
        """The batch of each KV cache group."""
        return (self, *self.other_groups)

    @property
    def num_uniform_tokens(self) -> int:
        return self.num_uniform * self.uniform_len


def prompts_of(step: StepRows, starts: IntArray) -> tuple[PromptChunk, ...]:
    """The prompts of a step: the sequences after the uniform ones. starts [num_seqs]: of their tokens."""
    first = step.num_uniform
    if first == len(step.rows):
        return ()
    places = starts[first : len(step.rows)].tolist()
    lengths = zip(places, step.query_lens[first:].tolist(), step.seq_lens[first:].tolist(), strict=True)
    return tuple(PromptChunk(seq, *length) for seq, length in enumerate(lengths, first))
