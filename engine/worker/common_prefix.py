"""Finds sequences of a step that begin with the same blocks, so that attention reads their common prefix once
(cascade attention). Independent of the device.

V1's core counts the requests that hold a block, and calls a block common if all requests hold it. Here pins
hold blocks, too, so this module compares the block tables of the step's own sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.outputs import SchedulerOutput
from engine.worker.attention.backend import IntArray
from engine.worker.request_rows import RequestRows, StepRows
from engine.worker.sampling_batch import BoolArray

MIN_TOKENS = 256
"""Shorter prefixes are not worth a separate pass; V1's figure."""
MIN_SEQS = 8
"""For fewer sequences the pass is not worth it either; V1's figure."""
MIN_SHARE = 2
"""The pass computes rows of all sequences, so at least 1 / MIN_SHARE of them must begin with the prefix."""


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """A prefix that several uniform sequences of a step share."""

    row: int
    """A row whose block table begins with the prefix."""
    num_tokens: int
    has_it: BoolArray
    """Whether each sequence begins with the prefix: [num_uniform]."""


class PrefixFinder:
    """Finds the common prefix of each step. It searches again only when other sequences decode: while the
    same ones do, none of them gets blocks that another has.
    """

    def __init__(self, rows: RequestRows, block_size: int, groups: Sequence[int], unit: int) -> None:
        """``groups``: KV cache groups whose layers see all tokens; if empty, ``find`` returns None. ``unit``:
        the length of a prefix is a multiple of this."""
        self._rows = rows
        self._block_size = block_size
        self._groups = list(groups)
        self._unit = unit
        self._last_rows: IntArray = np.empty(0, dtype=np.int64)
        self._last: CommonPrefix | None = None

    @property
    def is_on(self) -> bool:
        return bool(self._groups)

    def find(self, plan: SchedulerOutput, step: StepRows) -> CommonPrefix | None:
        """Returns the prefix that the most uniform sequences of a step share and that was computed before the
        step; None if few share it or it is short. Call it for each plan in order, after applying its
        deltas."""
        if not self.is_on:
            return None
        rows = step.rows[: step.num_uniform]
        last = self._last
        computed = (step.seq_lens - step.query_lens)[: step.num_uniform]
        changed = plan.scheduled_new_reqs or plan.scheduled_cached_reqs.resumed_req_ids
        if (
            changed
            or not np.array_equal(rows, self._last_rows)
            or (last is not None and computed[last.has_it].min() < last.num_tokens)
        ):
            self._last_rows, self._last = rows, self._search(rows, computed)
        return self._last

    def _search(self, rows: IntArray, num_computed: IntArray) -> CommonPrefix | None:
        long = np.flatnonzero(num_computed >= MIN_TOKENS)
        if len(long) < MIN_SEQS:
            return None
        block = (MIN_TOKENS - 1) // self._block_size  # the last that all must share
        blocks = self._rows.tables_of(self._groups[0], rows[long], block + 1)[:, block]
        found, first, counts = np.unique(blocks, return_index=True, return_counts=True)
        most = int(counts.argmax())
        members = long[blocks == found[most]]
        if len(members) < max(MIN_SEQS, -(-len(rows) // MIN_SHARE)):
            return None
        row = int(rows[long[first[most]]])
        num_blocks = int(num_computed[members].min()) // self._block_size
        is_common = np.ones(num_blocks + 1, dtype=np.bool_)
        is_common[-1] = False
        for group in self._groups:
            tables = self._rows.tables_of(group, rows[members], num_blocks)
            is_common[:-1] &= (tables == tables[0]).all(axis=0)
        num_tokens = int(is_common.argmin()) * self._block_size // self._unit * self._unit
        if num_tokens < MIN_TOKENS:
            return None
        return CommonPrefix(row, num_tokens, np.isin(np.arange(len(rows)), members))
