"""The worker's request state in host memory, and a step plan as the flat arrays of a forward pass.

Does not know the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.core.outputs import SchedulerOutput
from engine.worker.attention.backend import AttentionBatch, IntArray
from engine.worker.prompt_logprobs import PromptRows, prompt_rows
from engine.worker.request_rows import RequestRows, StepRows
from engine.worker.sampling_batch import SamplingBatch
from engine.worker.verification import Verified


@dataclass(slots=True)
class StepInputs:
    """One step as arrays, sequences in the order of ``attention``."""

    req_ids: list[str]
    input_ids: IntArray
    """[num_tokens]"""
    positions: IntArray
    """[num_tokens]; with pictures [3, num_tokens], where the model has three positions for each token."""
    slots: IntArray
    """[num_tokens] slot for the KV of each token, in the first KV cache group."""
    attention: AttentionBatch
    sample_tokens: IntArray
    """[num_samples] the tokens of the step whose logits are sampled."""
    sample_seqs: IntArray
    """[num_samples] the sequences they belong to."""
    sample_rows: IntArray
    """[num_samples] the rows of the batch they belong to."""
    sample_drafts: IntArray | None
    """[num_samples] number of drafts of the sequence up to each sample; None: there are no drafts."""
    prompts: list[PromptRows]
    """Tokens whose logits give log-probabilities of prompts, for requests that want them."""
    adapters: list[str | None]
    """Key of each sequence's adapter."""

    @property
    def query_lens(self) -> IntArray:
        """[num_seqs] tokens computed in this step."""
        return self.attention.query_lens

    @property
    def seq_lens(self) -> IntArray:
        """[num_seqs] tokens in the KV after this step."""
        return self.attention.seq_lens

    @property
    def logit_tokens(self) -> IntArray:
        """The tokens of the step whose logits are needed: [num_samples + rows of ``prompts``]"""
        if not self.prompts:
            return self.sample_tokens
        return np.concatenate([self.sample_tokens, *(rows.tokens for rows in self.prompts)])


class InputBatch:
    """Keeps the rows of the requests, and their token ids."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        num_groups: int = 1,
        *,
        samples: bool = True,
    ) -> None:
        """``num_groups``: of the model's KV cache. ``samples``: see ``RequestRows``."""
        self.block_size = block_size
        sizes = max_num_seqs, max_model_len, block_size, vocab_size, num_groups
        self._rows = RequestRows(*sizes, samples=samples)
        self.token_ids: IntArray = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        """[max_num_seqs, max_model_len + 1]"""

    def __len__(self) -> int:
        """Number of known requests, preempted ones included."""
        return len(self._rows)

    def update(self, plan: SchedulerOutput) -> None:
        """Apply the deltas of a plan."""
        changes = self._rows.update(plan)
        for row, token_ids in changes.tokens:
            self.token_ids[row, : len(token_ids)] = token_ids
        for row, start, sampled in changes.new_tokens:
            self.token_ids[row, start : start + len(sampled)] = sampled

    def step_inputs(self, plan: SchedulerOutput) -> StepInputs:
        """The arrays of a forward pass: single-token sequences first, shortest first."""
        step = self._rows.step_rows(plan)
        for row, start, drafts in self._rows.places_of_drafts(plan):
            self.token_ids[row, start : start + len(drafts)] = drafts
        return StepInputs(
            req_ids=step.req_ids,
            input_ids=self.token_ids[step.row_of_token, step.positions],
            positions=step.positions,
            slots=step.slots,
            attention=self._attention_batch(step),
            sample_tokens=step.sample_tokens,
            sample_seqs=step.sample_seqs,
            sample_rows=step.sample_rows,
            sample_drafts=step.sample_drafts,
            prompts=self._prompt_rows(plan, step),
            adapters=self._rows.adapters_of(step.req_ids),
        )

    def _prompt_rows(self, plan: SchedulerOutput, step: StepRows) -> list[PromptRows]:
        told = self._rows.prompts_told(plan)
        return prompt_rows(told, step, lambda row, start, count: self.token_ids[row, start : start + count])

    def _attention_batch(self, step: StepRows) -> AttentionBatch:
        max_blocks = -(-int(step.seq_lens.max()) // self.block_size)
        slot_blocks, slot_offsets = np.divmod(step.slots, self.block_size)
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
                slot_blocks=slots // self.block_size,
            )
            for group, slots in enumerate(step.other_slots, 1)
        )
        return replace(batch, other_groups=others)

    def sampling_batch(self, step: StepInputs) -> SamplingBatch:
        return self._rows.sampling_batch(step.sample_rows, step.sample_drafts)

    def rows_of(self, req_ids: Sequence[str]) -> IntArray:
        """The rows of running requests: [len(req_ids)]"""
        return self._rows.rows_of(req_ids)

    def num_tokens_of(self, rows: IntArray) -> IntArray:
        """The number of confirmed tokens of each row: [len(rows)]"""
        return self._rows.num_tokens_of(rows)

    def num_slots_of(self, rows: IntArray) -> IntArray:
        """The number of tokens that fit in the blocks of each row: [len(rows)]"""
        return self._rows.num_slots_of(rows)

    def block_tables_of(self, rows: IntArray) -> IntArray:
        """The block tables of rows in the first KV cache group: [len(rows), max_blocks]"""
        return self._rows.tables_of(0, rows, -(-self.token_ids.shape[1] // self.block_size))

    def append_sampled(self, rows: IntArray, token_ids: IntArray) -> None:
        """Append a sampled token to each of these rows, so that the scheduler need not send it back."""
        self.token_ids[rows, self._rows.add_tokens(rows)] = token_ids

    def take_verified(self, verified: Verified, rows: IntArray, token_ids: IntArray) -> None:
        """Append the tokens that verification kept: accepted drafts are already there, the last is written.

        rows, token_ids [num_samples]
        """
        last = verified.ends - 1
        start = self._rows.add_tokens(rows[last], verified.counts)
        self.token_ids[rows[last], start + verified.counts - 1] = token_ids[last]
