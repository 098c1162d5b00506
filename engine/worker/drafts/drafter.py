"""Drafts tokens after a step: it first processes the step's tokens that the drafter has not seen, then drafts
one token at a time, greedily. Does not know what kind of network drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.core.drafts.lengths import MIN_CHANCE
from engine.core.drafts.proposal import Proposal
from engine.core.outputs import SchedulerOutput
from engine.worker.attention.backend import AttentionBackend, IntArray
from engine.worker.cpu.input_batch import InputBatch, StepInputs
from engine.worker.drafts.draft_inputs import DraftInputs, draft_inputs
from engine.worker.drafts.drafted import Drafted
from engine.worker.sampling_batch import BoolArray


class DraftNetwork(Protocol):
    """The weights of a drafter, with a separate KV cache."""

    shift: int
    """The distance from a hidden state to the token that is read with it. 0: it reads only tokens; 1: place p
    reads the model's hidden state of p and the token of p + 1."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        sample_rows: torch.Tensor,
        attention: AttentionBackend,
    ) -> Drafted:
        """input_ids, positions [num_tokens]; hidden [num_tokens, size], the model's or the network's, for a
        network with a shift; sample_rows [num_samples], ascending"""


@dataclass(slots=True)
class _Round:
    """The sequences of a step whose tokens the drafter computes; every array is [num_seqs]."""

    req_ids: list[str]
    rows: IntArray
    starts: IntArray
    """The first place that the drafter computes."""
    ends: IntArray
    """The place after the last confirmed token that has a block."""
    num_drafts: IntArray
    """The number of tokens to draft; 0 for a sequence whose KV is only updated."""
    first_hidden: IntArray
    """The index, among the step's tokens, of the token at ``starts``."""
    is_free: BoolArray
    """Whether the sequence reads no KV that others of the step write."""

    def some(self, chosen: IntArray) -> _Round:
        """The sequences with these indices."""
        return _Round(
            [self.req_ids[index] for index in chosen.tolist()],
            self.rows[chosen],
            self.starts[chosen],
            self.ends[chosen],
            self.num_drafts[chosen],
            self.first_hidden[chosen],
            self.is_free[chosen],
        )


class WorkerDrafter:
    """Keeps a network's KV in the same blocks as the model's, and drafts for requests that were sampled.

    After each step the network has the KV of all places that the model has, so a block that another request
    finds in the cache, or that is loaded from another tier, serves both.
    """

    def __init__(
        self,
        network: DraftNetwork,
        attention: AttentionBackend,
        batch: InputBatch,
        num_tokens: int,
        max_model_len: int,
    ) -> None:
        """``num_tokens``: the most tokens drafted at once. ``batch``: the rows of the model's requests."""
        self._network = network
        self._attention = attention
        self._batch = batch
        self._num_tokens = num_tokens
        self._max_model_len = max_model_len
        self._num_computed: IntArray = np.zeros(len(batch.token_ids), dtype=np.int64)
        """[max_num_seqs] number of places of each row whose KV the network has, all of confirmed tokens."""

    def draft(
        self,
        plan: SchedulerOutput,
        step: StepInputs,
        sampled: list[list[int]],
        hidden: torch.Tensor | None = None,
    ) -> dict[str, Proposal]:
        """Process the tokens of a sampled step, and draft. ``sampled``: the new tokens of each of its
        sequences; ``hidden`` [num_tokens, size]: the model's, for a network with a shift. Returns drafts by
        request."""
        of_step = self._round(plan, step, sampled)
        behind = of_step.some(np.flatnonzero(of_step.ends > of_step.starts))
        self._num_computed[of_step.rows] = np.maximum(of_step.starts, of_step.ends)
        if not behind.req_ids:
            return {}
        tables = self._batch.block_tables_of(behind.rows)
        inputs = draft_inputs(behind.starts, behind.ends, tables, self._batch.block_size, behind.is_free)
        behind_order = behind.some(inputs.order)
        chosen = np.flatnonzero(behind_order.num_drafts)
        token_ids = self._batch.token_ids[
            behind.rows[inputs.seq_of_token], inputs.positions + self._network.shift
        ]
        if hidden is not None:
            indices = (behind.first_hidden - behind.starts)[inputs.seq_of_token] + inputs.positions
            hidden = hidden[torch.from_numpy(indices)]
        first = self._forward(inputs, token_ids, hidden, inputs.last_tokens[chosen])
        return self._go_on(behind_order.some(chosen), first)

    def _round(self, plan: SchedulerOutput, step: StepInputs, sampled: list[list[int]]) -> _Round:
        """The work to do for each sequence of the step."""
        batch = self._batch
        shift = self._network.shift
        rows = batch.rows_of(step.req_ids)
        admitted = {new.req_id for new in plan.scheduled_new_reqs}
        admitted |= plan.scheduled_cached_reqs.resumed_req_ids
        is_new = np.array([req_id in admitted for req_id in step.req_ids], dtype=np.bool_)
        is_sampled = np.array([bool(tokens) for tokens in sampled], dtype=np.bool_)
        query_lens = step.attention.query_lens
        seq_lens = step.attention.seq_lens
        computed = seq_lens - query_lens
        starts = np.maximum(np.where(is_new, 0, self._num_computed[rows]), computed)
        confirmed = np.where(is_sampled, batch.num_tokens_of(rows) - shift, seq_lens)
        rooms = np.minimum(batch.num_slots_of(rows), self._max_model_len)
        ends = np.minimum(confirmed, rooms)
        num_drafts = np.minimum(self._num_tokens, rooms - ends + 1)
        reads_none = np.arange(len(rows)) < step.attention.num_decodes
        return _Round(
            step.req_ids,
            rows,
            starts,
            ends,
            np.where(is_sampled & (ends == confirmed), num_drafts, 0),
            np.cumsum(query_lens) - query_lens + starts - computed,
            ~is_new | reads_none,
        )

    def _go_on(self, some: _Round, first: Drafted) -> dict[str, Proposal]:
        """Draft after the first tokens, while there are places and a draft is likely enough to be used."""
        tokens: dict[str, list[int]] = {req_id: [] for req_id in some.req_ids}
        chances: dict[str, list[float]] = {req_id: [] for req_id in some.req_ids}
        order = some.ends.argsort(kind="stable")  # one-token sequences then stay in this order
        some = some.some(order)
        last = first.some(order)
        for count in range(1, self._num_tokens + 1):
            for req_id, token, chance in zip(some.req_ids, last.token_ids, last.chances, strict=True):
                tokens[req_id].append(int(token))
                chances[req_id].append(float(chance))
            going = np.flatnonzero((some.num_drafts > count) & (last.chances >= MIN_CHANCE))
            if not len(going):
                break
            some = some.some(going)
            last = last.some(going)
            last = self._one_more(some, last, some.ends + count - 1).behind(last)
        return {req_id: Proposal(tokens[req_id], chances[req_id]) for req_id in tokens}

    def _one_more(self, some: _Round, last: Drafted, places: IntArray) -> Drafted:
        """The drafts that follow those at ``places`` [num_seqs]."""
        tables = self._batch.block_tables_of(some.rows)
        is_free = np.ones(len(places), dtype=np.bool_)
        inputs = draft_inputs(places, places + 1, tables, self._batch.block_size, is_free)
        return self._forward(inputs, last.token_ids, last.hidden, inputs.last_tokens)

    def _forward(
        self, inputs: DraftInputs, token_ids: IntArray, hidden: torch.Tensor | None, sample_rows: IntArray
    ) -> Drafted:
        self._attention.begin_step(inputs.attention)
        return self._network.forward(
            torch.from_numpy(token_ids),
            torch.from_numpy(inputs.positions),
            hidden,
            torch.from_numpy(sample_rows),
            self._attention,
        )
