"""One step's sequences as they lie on the device: what kernels read, and what launching them takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A sequence with query tokens of its own number, as the host knows it."""

    seq: int
    """Its place among the sequences of the step."""
    first_token: int
    """Its first token among the tokens of the step."""
    query_len: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Tokens of all sequences flattened into one axis: first ``num_uniform`` sequences of ``uniform_len``
    query tokens each (1: decodes; more: drafts to be verified), then the prompts.

    All tensors are on the device; nothing here makes the host wait for it.
    """

    rows: torch.Tensor
    """[num_seqs] int32: the row of ``block_tables`` of each sequence."""
    query_starts: torch.Tensor
    """[num_seqs + 1] int32: where each sequence's tokens begin."""
    seq_lens: torch.Tensor
    """[num_seqs] int32: tokens in the KV once the step is done; 0: a place of a graph that nobody took."""
    block_tables: torch.Tensor
    """[num_rows, max_blocks] int32: of every request, not only those of the step."""
    positions: torch.Tensor
    """[num_tokens] int64."""
    slots: torch.Tensor
    """[num_tokens] int64: where K and V of each token go, block * block_size + offset; -1: nowhere."""
    num_uniform: int
    uniform_len: int
    max_uniform_seq_len: int
    """No uniform sequence is longer; in a graph the longest that can be."""
    prompts: tuple[PromptChunk, ...] = ()
    """The sequences that follow the uniform ones, in order."""

    @property
    def num_uniform_tokens(self) -> int:
        return self.num_uniform * self.uniform_len
