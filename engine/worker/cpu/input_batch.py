"""The worker's request state in host memory, and a step plan as the flat arrays of a forward pass.

Does not know the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.core.outputs import SchedulerOutput
from engine.worker.attention.backend import AttentionBatch, IntArray
from engine.worker.request_rows import RequestRows, StepRows
from engine.worker.sampling_batch import SamplingBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as arrays, sequences in the order of ``attention``."""

    req_ids: list[str]
    input_ids: IntArray
    """[num_tokens]"""
    positions: IntArray
    """[num_tokens]"""
    slots: IntArray
    """[num_tokens] where the KV of each token goes, in the first KV cache group."""
    attention: AttentionBatch
    sample_tokens: IntArray
    """[num_samples] the tokens of the step whose logits are sampled."""
    sample_seqs: IntArray
    """[num_samples] the sequences they belong to."""
    sample_rows: IntArray
    """[num_samples] the rows of the batch they belong to."""


class InputBatch:
    """The rows of the requests, and their token ids."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int, num_groups: int = 1
    ) -> None:
        """``num_groups``: of the model's KV cache."""
        self._block_size = block_size
        self._rows = RequestRows(max_num_seqs, max_model_len, block_size, vocab_size, num_groups)
        self.token_ids: IntArray = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        """[max_num_seqs, max_model_len + 1]"""

    def __len__(self) -> int:
        """Number of known requests, preempted ones included."""
        return len(self._rows)

    def update(self, plan: SchedulerOutput) -> None:
        """Apply the deltas of a plan."""
        for row, token_ids in self._rows.update(plan).tokens:
            self.token_ids[row, : len(token_ids)] = token_ids

    def step_inputs(self, plan: SchedulerOutput) -> StepInputs:
        """The arrays of a forward pass: single-token sequences first, shortest first."""
        step = self._rows.step_rows(plan)
        return StepInputs(
            req_ids=step.req_ids,
            input_ids=self.token_ids[step.row_of_token, step.positions],
            positions=step.positions,
            slots=step.slots,
            attention=self._attention_batch(step),
            sample_tokens=step.sample_tokens,
            sample_seqs=step.sample_seqs,
            sample_rows=step.sample_rows,
        )

    def _attention_batch(self, step: StepRows) -> AttentionBatch:
        max_blocks = -(-int(step.seq_lens.max()) // self._block_size)
        slot_blocks, slot_offsets = np.divmod(step.slots, self._block_size)
        batch = AttentionBatch(
            num_decodes=step.num_uniform,
            query_lens=step.query_lens,
            seq_lens=step.seq_lens,
            block_tables=self._rows.tables_of(0, step.rows, max_blocks),
            slot_blocks=slot_blocks,
            slot_offsets=slot_offsets,
        )
        return batch if not step.other_slots else self._with_other_groups(batch, step, max_blocks)

    def _with_other_groups(self, batch: AttentionBatch, step: StepRows, max_blocks: int) -> AttentionBatch:
        others = tuple(
            replace(
                batch,
                block_tables=self._rows.tables_of(group, step.rows, max_blocks),
                slot_blocks=slots // self._block_size,
            )
            for group, slots in enumerate(step.other_slots, 1)
        )
        return replace(batch, other_groups=others)

    def sampling_batch(self, rows: IntArray) -> SamplingBatch:
        return self._rows.sampling_batch(rows)

    def append_sampled(self, rows: IntArray, token_ids: IntArray) -> None:
        """Append sampled tokens to their rows, so that the scheduler need not send them back."""
        self.token_ids[rows, self._rows.add_tokens(rows)] = token_ids
