"""Decides which sequences of a step are computed in chunks, and which token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.worker.attention.backend import IntArray
from engine.worker.states.state_batch import StateBatch

CHUNK = 64
"""Tokens per chunk."""
MIN_TOKENS = 32
"""Shorter sequences are computed token by token: chunks take several launches, and whole tiles."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """The table of a step's sequences that kernels read; int64, on the device."""

    sequences: torch.Tensor
    """[num_seqs, 6]: first token, tokens, source, target, first chunk, chunks. Those without chunks come
    first. Six numbers, so that what follows begins at a multiple of 16 bytes, for which kernels are
    compiled."""
    chunks: torch.Tensor
    """[num_chunks, 2]: first token, tokens."""
    num_short: int
    """Sequences without chunks."""

    @property
    def chunked(self) -> torch.Tensor:
        """The rows of sequences that have chunks."""
        return self.sequences[self.num_short :]


def table_on(batch: StateBatch, device: torch.device) -> StepTable:
    """The table of a batch, copied to the device once, for the first layer of a step."""
    if device not in batch.on_device:
        sequences = _sequences(batch)
        chunks = _chunks(batch)
        numbers = torch.from_numpy(np.concatenate((sequences.ravel(), chunks.ravel()))).to(device)
        batch.on_device[device] = StepTable(
            numbers[: sequences.size].view(sequences.shape),
            numbers[sequences.size :].view(chunks.shape),
            int(np.count_nonzero(sequences[:, 5] == 0)),
        )
    found = batch.on_device[device]
    assert isinstance(found, StepTable)
    return found


def _sequences(batch: StateBatch) -> IntArray:
    """See StepTable."""
    lengths = batch.query_lens
    num_chunks = _num_chunks(batch)
    firsts = np.cumsum(num_chunks) - num_chunks
    columns = (batch.starts, lengths, batch.sources, batch.targets, firsts, num_chunks)
    rows: IntArray = np.stack(columns, axis=1).astype(np.int64)
    return rows[np.argsort(num_chunks > 0, kind="stable")]


def _chunks(batch: StateBatch) -> IntArray:
    """See StepTable."""
    num_chunks = _num_chunks(batch)
    before = np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    offsets = CHUNK * (np.arange(num_chunks.sum()) - before)
    left = np.repeat(batch.query_lens, num_chunks) - offsets
    firsts = np.repeat(batch.starts, num_chunks) + offsets
    rows: IntArray = np.stack((firsts, np.minimum(left, CHUNK)), axis=1).astype(np.int64)
    return rows


def _num_chunks(batch: StateBatch) -> IntArray:
    """[num_seqs]; 0 for sequences that are computed token by token."""
    found: IntArray = np.where(batch.query_lens >= MIN_TOKENS, -(-batch.query_lens // CHUNK), 0)
    return found
