"""Takes states to the last draft that was accepted: a state cannot be taken back, so it is computed twice.

A step computes sequences that have drafts from their sources as ever, but leaves what comes out in slot 0,
which nobody reads. When it is known how many drafts were accepted, the same operations run again for the
tokens that count only, and write to the sequences' targets. That costs no product with a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.worker.attention.backend import IntArray
from engine.worker.states.state_batch import StateBatch

_TRASH = 0
"""The slot that is never read."""

Operation = Callable[[Sequence[torch.Tensor], StateBatch], object]
"""Advances states by tokens: their inputs, each [num_tokens, ...], and the sequences they belong to."""


class DraftedStates:
    """The sequences with drafts of one step, and the inputs that their states saw."""

    def __init__(self, batch: StateBatch, num_drafts: IntArray) -> None:
        """``num_drafts``: [num_seqs] drafts among the tokens of each sequence, of some at least."""
        self._seqs = np.flatnonzero(num_drafts)
        self._lens = batch.query_lens[self._seqs]
        self._num_drafts = num_drafts[self._seqs]
        self._sources, self._targets = batch.sources[self._seqs], batch.targets[self._seqs]
        starts = np.repeat(batch.starts[self._seqs], self._lens)
        self._rows = torch.from_numpy(starts + _counted(self._lens))
        self._seen: list[tuple[Operation, list[torch.Tensor]]] = []
        targets = batch.targets.copy()
        targets[self._seqs] = _TRASH
        self.batch = StateBatch(batch.query_lens, batch.sources, targets)
        """The step's sequences, as they are computed first."""

    def see(self, operation: Operation, inputs: Sequence[torch.Tensor]) -> None:
        """Keep what the sequences with drafts have of the inputs [num_tokens, ...] of an operation."""
        rows = self._rows.to(inputs[0].device)
        self._seen.append((operation, [each[rows] for each in inputs]))

    def settle(self, num_accepted: dict[int, int]) -> None:
        """Write the states behind the accepted drafts.

        ``num_accepted``: of each sequence that has drafts, by its number in the step.
        """
        accepted = np.array([num_accepted[seq] for seq in self._seqs.tolist()], dtype=np.int64)
        lens = self._lens - self._num_drafts + accepted
        batch = StateBatch(lens, self._sources, self._targets)
        starts = np.cumsum(self._lens) - self._lens
        rows = torch.from_numpy(np.repeat(starts, lens) + _counted(lens))
        for operation, inputs in self._seen:
            there = rows.to(inputs[0].device)
            operation([each[there] for each in inputs], batch)
        self._seen.clear()


def _counted(lens: IntArray) -> IntArray:
    """0, 1, .. for each sequence, one behind the other: [sum(lens)]."""
    starts = np.cumsum(lens) - lens
    counted: IntArray = np.arange(lens.sum()) - np.repeat(starts, lens)
    return counted
