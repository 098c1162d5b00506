"""The worker's memory of its requests: one row each, kept from step to step and changed by the plan's deltas.

Turns a step plan into the flat arrays of a forward pass. Does not know the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.outputs import NewRequestData, SchedulerOutput
from engine.sampling_params import SamplingParams
from engine.worker.attention.backend import AttentionBatch, IntArray
from engine.worker.sampling_batch import SamplingBatch, SamplingTable


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as arrays, sequences in the order of ``attention``."""

    req_ids: list[str]
    input_ids: IntArray
    """[num_tokens]"""
    positions: IntArray
    """[num_tokens]"""
    attention: AttentionBatch
    sample_tokens: IntArray
    """[num_samples] the tokens of the step whose logits are sampled."""
    sample_seqs: IntArray
    """[num_samples] the sequences they belong to."""
    sample_rows: IntArray
    """[num_samples] the rows of the batch they belong to."""


@dataclass(slots=True)
class _Known:
    """A request the scheduler has told of and not yet ended; without a row while preempted."""

    params: SamplingParams
    num_prompt_tokens: int
    row: int | None = None


class InputBatch:
    """Rows of token ids and block ids, and the sampling parameters beside them."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._known: dict[str, _Known] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        max_blocks = -(-max_model_len // block_size)
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._blocks = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._sampling = SamplingTable(max_num_seqs, vocab_size)

    def __len__(self) -> int:
        """Requests known, preempted ones included."""
        return len(self._known)

    def update(self, plan: SchedulerOutput) -> None:
        """Apply the deltas of a plan: first what leaves, so that its rows can be had again."""
        for req_id in plan.finished_req_ids:
            known = self._known.pop(req_id, None)
            if known is not None:
                self._release_row(known)
        for req_id in plan.preempted_req_ids:
            self._release_row(self._known[req_id])
        for new in plan.scheduled_new_reqs:
            self._add(new)
        cached = plan.scheduled_cached_reqs
        for req_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            known = self._known[req_id]
            if req_id in cached.resumed_req_ids:
                self._resume(known, cached.resumed_token_ids[req_id])
            assert known.row is not None
            self._num_computed[known.row] = num_computed
            if block_ids:
                self._append_blocks(known.row, block_ids)

    def step_inputs(self, plan: SchedulerOutput) -> StepInputs:
        """The arrays of a forward pass: single-token sequences first, shortest first."""
        req_ids = list(plan.num_scheduled_tokens)
        rows = np.array([self._known[req_id].row for req_id in req_ids], dtype=np.int64)
        query_lens = np.fromiter(plan.num_scheduled_tokens.values(), dtype=np.int64, count=len(req_ids))
        seq_lens = self._num_computed[rows] + query_lens
        order = np.lexsort((seq_lens, query_lens != 1))
        rows, query_lens, seq_lens = rows[order], query_lens[order], seq_lens[order]

        ends = np.cumsum(query_lens)
        seq_of_token = np.repeat(np.arange(len(rows)), query_lens)
        row_of_token = rows[seq_of_token]
        positions = np.arange(ends[-1]) + (seq_lens - ends)[seq_of_token]
        max_blocks = -(-int(seq_lens.max()) // self._block_size)
        sample_seqs = np.flatnonzero(seq_lens >= self._num_tokens[rows])
        return StepInputs(
            req_ids=[req_ids[i] for i in order],
            input_ids=self._token_ids[row_of_token, positions],
            positions=positions,
            attention=AttentionBatch(
                num_decodes=int(np.count_nonzero(query_lens == 1)),
                query_lens=query_lens,
                seq_lens=seq_lens,
                block_tables=self._blocks[rows, :max_blocks],
                slot_blocks=self._blocks[row_of_token, positions // self._block_size],
                slot_offsets=positions % self._block_size,
            ),
            sample_tokens=ends[sample_seqs] - 1,
            sample_seqs=sample_seqs,
            sample_rows=rows[sample_seqs],
        )

    def sampling_batch(self, rows: IntArray) -> SamplingBatch:
        return self._sampling.batch(rows, self._token_ids, self._num_tokens)

    def append_sampled(self, rows: IntArray, token_ids: IntArray) -> None:
        """The sampled tokens become known, so that the scheduler need not send them back."""
        self._token_ids[rows, self._num_tokens[rows]] = token_ids
        self._num_tokens[rows] += 1

    def _add(self, new: NewRequestData) -> None:
        assert new.req_id not in self._known, f"request {new.req_id} is already known"
        known = _Known(new.sampling_params, len(new.prompt_token_ids))
        self._known[new.req_id] = known
        row = self._take_row(known, new.prompt_token_ids)
        self._num_computed[row] = new.num_computed_tokens
        self._append_blocks(row, new.block_ids)

    def _resume(self, known: _Known, token_ids: list[int]) -> None:
        self._release_row(known)
        self._take_row(known, token_ids)

    def _take_row(self, known: _Known, token_ids: list[int]) -> int:
        row = self._free_rows.pop()
        known.row = row
        self._token_ids[row, : len(token_ids)] = token_ids
        self._num_tokens[row] = len(token_ids)
        self._num_blocks[row] = 0
        # Shorter tables are padded to the longest of a step; the padding must name a real block.
        self._blocks[row] = 0
        self._sampling.set_row(row, known.params, known.num_prompt_tokens)
        return row

    def _release_row(self, known: _Known) -> None:
        if known.row is not None:
            self._sampling.clear_row(known.row)
            self._free_rows.append(known.row)
            known.row = None

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = self._num_blocks[row]
        self._blocks[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)
