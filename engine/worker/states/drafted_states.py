"""Advances states up to the last accepted draft. As states cannot be rolled back, they are computed twice.

A step computes sequences with drafts from their sources as usual, but writes the new states to slot 0, which
is never read. When the number of accepted drafts is known, the same operations run again, only for the known
tokens and the accepted drafts, and write to the sequences' targets. This needs no GEMM with weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from engine.worker.attention.backend import IntArray
from engine.worker.states.operations import OverTokens
from engine.worker.states.state_batch import StateBatch

_TRASH = 0
"""The slot that is never read."""

Operation = Callable[[Any, StateBatch], object]
"""Advances states by tokens, given their inputs (``OverTokens``) and the sequences they belong to."""


class DraftedStates:
    """The sequences with drafts of one step, and the inputs of their states."""

    def __init__(self, batch: StateBatch, num_drafts: IntArray) -> None:
        """``num_drafts``: [num_seqs] drafts among the tokens of each sequence; some are not 0."""
        self._seqs = np.flatnonzero(num_drafts)
        self._lens = batch.query_lens[self._seqs]
        self._num_drafts = num_drafts[self._seqs]
        self._sources = batch.sources[self._seqs]
        self._targets = batch.targets[self._seqs]
        starts = np.repeat(batch.starts[self._seqs], self._lens)
        self._rows = torch.from_numpy(starts + _counted(self._lens))
        self._seen: list[tuple[Operation, OverTokens]] = []
        targets = batch.targets.copy()
        targets[self._seqs] = _TRASH
        self.batch = StateBatch(batch.query_lens, batch.sources, targets)
        """The step's sequences, as they are first computed."""

    def see(self, operation: Operation, inputs: OverTokens, device: torch.device) -> None:
        """Keep the inputs of the tokens that belong to sequences with drafts. ``device``: where they are."""
        self._rows = self._rows.to(device)
        self._seen.append((operation, inputs.of_tokens(self._rows)))

    def settle(self, num_accepted: Mapping[int, int]) -> None:
        """Write the states after the accepted drafts.

        ``num_accepted``: for each sequence with drafts, by its number in the step.
        """
        accepted = np.array([num_accepted[seq] for seq in self._seqs.tolist()], dtype=np.int64)
        lens = self._lens - self._num_drafts + accepted
        batch = StateBatch(lens, self._sources, self._targets)
        starts = np.cumsum(self._lens) - self._lens
        rows = torch.from_numpy(np.repeat(starts, lens) + _counted(lens))
        rows = rows.to(self._rows.device)
        for operation, inputs in self._seen:
            operation(inputs.of_tokens(rows), batch)
        self._seen.clear()


def _counted(lens: IntArray) -> IntArray:
    """0, 1, .. for each sequence, one after another: [sum(lens)]."""
    starts = np.cumsum(lens) - lens
    counted: IntArray = np.arange(lens.sum()) - np.repeat(starts, lens)
    return counted
