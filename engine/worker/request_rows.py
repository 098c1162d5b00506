"""Assigns each running request of a worker a row: block table, lengths and sampling parameters, kept from
step to step and changed by the plans' deltas.

Does not know the model, nor where token ids are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.core.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from engine.records.sampling_params import SamplingParams
from engine.worker.attention.backend import IntArray
from engine.worker.sampling_batch import BoolArray, SamplingBatch, SamplingTable

_NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class StepRows:
    """One step as arrays: first the uniform sequences, shortest first, then the others, each after those
    whose KV it reads."""

    req_ids: list[str]
    num_uniform: int
    """Sequences that have exactly ``uniform_len`` query tokens; see ``RequestRows.step_rows``."""
    rows: IntArray
    """[num_seqs]"""
    query_lens: IntArray
    """[num_seqs] tokens computed in this step."""
    seq_lens: IntArray
    """[num_seqs] tokens in the KV after this step."""
    row_of_token: IntArray
    """[num_tokens]"""
    positions: IntArray
    """[num_tokens]"""
    slots: IntArray
    """[num_tokens] slot for the K and V of each token: block * block_size + offset."""
    other_slots: tuple[IntArray, ...]
    """[num_tokens] each, for the KV cache groups after the first."""
    sample_tokens: IntArray
    """[num_samples] the tokens of the step whose logits are sampled: the last known token of a sequence, and
    its drafts."""
    sample_seqs: IntArray
    """[num_samples] the sequences they belong to."""
    sample_drafts: IntArray | None = None
    """[num_samples] number of drafts of the sequence up to each sample; None: there are no drafts."""

    @property
    def sample_rows(self) -> IntArray:
        """[num_samples]"""
        return self.rows[self.sample_seqs]


@dataclass(frozen=True, slots=True)
class RowChanges:
    """The changes of a plan, for a caller that keeps a copy on a device."""

    tokens: list[tuple[int, list[int]]] = field(default_factory=list)
    """Each entry: a row, and all its tokens."""
    new_tokens: list[tuple[int, int, Sequence[int]]] = field(default_factory=list)
    """Each entry: a row, its number of known tokens, and the next ones, which another stage sampled."""
    blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """Each entry: a row, an index into its block table, and the block ids from there on. With several KV
    cache groups the tables are interleaved; see ``RequestRows.block_tables``."""


@dataclass(slots=True)
class _Known:
    """A request that the scheduler has sent and not yet ended; it has no row while preempted."""

    params: SamplingParams
    num_prompt_tokens: int
    adapter: str | None = None
    row: int | None = None


class RequestRows:
    """Keeps a row for each request that runs."""

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
        """``num_groups``: of the model's KV cache. ``samples``: False in a pipeline stage that makes no
        logits; it receives the tokens that the last stage sampled."""
        self._samples = samples
        self._num_groups = num_groups
        self._block_size = block_size
        self._known: dict[str, _Known] = {}
        self._num_told = 0
        """Known requests that want log-probabilities of their prompts."""
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        max_blocks = -(-max_model_len // block_size)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_tables: IntArray = np.zeros((max_num_seqs, max_blocks * num_groups), dtype=np.int64)
        """[max_num_seqs, max_blocks * num_groups]: the first block of each KV cache group, the second of
        each, and so on, as in plans; entries past a row's end are 0, the null block."""
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._sampling = SamplingTable(max_num_seqs, vocab_size)

    def __len__(self) -> int:
        """Number of known requests, preempted ones included."""
        return len(self._known)

    def update(self, plan: SchedulerOutput) -> RowChanges:
        """Apply the deltas of a plan: first free the rows of ended requests, so that they can be reused."""
        changes = RowChanges()
        for req_id in plan.finished_req_ids:
            known = self._known.pop(req_id, None)
            if known is not None:
                self._release_row(known)
                self._num_told -= known.params.prompt_logprobs is not None
        for req_id in plan.preempted_req_ids:
            self._release_row(self._known[req_id])
        for new in plan.scheduled_new_reqs:
            self._add(new, changes)
        self._update_cached(plan.scheduled_cached_reqs, changes)
        return changes

    def step_rows(
        self, plan: SchedulerOutput, uniform_len: int = 1, *, writes_first: bool = False
    ) -> StepRows:
        """Return the arrays of a plan whose deltas are applied and that has tokens to compute. First come the
        sequences of ``uniform_len`` query tokens that read no KV written by the others.

        ``writes_first``: in each layer all K and V are written to the pool before any are read, so that the
        sequences of ``uniform_len`` tokens may read any block.
        """
        req_ids = list(plan.num_scheduled_tokens)
        rows = np.array([self._row_of(req_id) for req_id in req_ids], dtype=np.int64)
        query_lens = np.fromiter(plan.num_scheduled_tokens.values(), dtype=np.int64, count=len(req_ids))
        seq_lens = self._num_computed[rows] + query_lens
        is_uniform = query_lens == uniform_len
        if not writes_first:
            self._exclude_readers(is_uniform, plan, rows, seq_lens)
        order = _shortest_uniform_first(is_uniform, seq_lens)
        rows = rows[order]
        query_lens = query_lens[order]
        seq_lens = seq_lens[order]

        ends = np.cumsum(query_lens)
        seq_of_token = np.repeat(np.arange(len(rows)), query_lens)
        row_of_token = rows[seq_of_token]
        positions = np.arange(ends[-1]) + (seq_lens - ends)[seq_of_token]
        blocks, offsets = np.divmod(positions, self._block_size)
        sample_seqs = np.flatnonzero((seq_lens >= self._num_tokens[rows]) & self._samples)
        sample_tokens = ends[sample_seqs] - 1
        sample_drafts = None
        if plan.scheduled_spec_decode_tokens:
            num_drafts = (seq_lens - self._num_tokens[rows])[sample_seqs]
            sample_drafts = _counted_up(num_drafts)
            sample_tokens = np.repeat(sample_tokens - num_drafts, num_drafts + 1) + sample_drafts
            sample_seqs = np.repeat(sample_seqs, num_drafts + 1)
        return StepRows(
            req_ids=[req_ids[i] for i in order],
            num_uniform=int(np.count_nonzero(is_uniform)),
            rows=rows,
            query_lens=query_lens,
            seq_lens=seq_lens,
            row_of_token=row_of_token,
            positions=positions,
            slots=self._slots(0, row_of_token, blocks, offsets),
            other_slots=tuple(
                self._slots(group, row_of_token, blocks, offsets) for group in range(1, self._num_groups)
            ),
            sample_tokens=sample_tokens,
            sample_seqs=sample_seqs,
            sample_drafts=sample_drafts,
        )

    def prompts_told(self, plan: SchedulerOutput) -> dict[str, tuple[int, int]]:
        """For each request of a plan that wants log-probabilities of its prompt, by id: the number of tokens
        of the prompt, and of alternatives per token. Empty in pipeline stages before the last."""
        if not self._samples or not self._num_told:
            return {}
        known = ((req_id, self._known[req_id]) for req_id in plan.num_scheduled_tokens)
        return {
            req_id: (its.num_prompt_tokens, its.params.prompt_logprobs)
            for req_id, its in known
            if its.params.prompt_logprobs is not None
        }

    def places_of_drafts(self, plan: SchedulerOutput) -> Iterator[tuple[int, int, list[int]]]:
        """Yields the row of each request with drafts, the index of the first draft in it, and the drafts."""
        for req_id, drafts in plan.scheduled_spec_decode_tokens.items():
            row = self._row_of(req_id)
            yield row, int(self._num_tokens[row]), drafts

    def tables_of(self, group: int, rows: IntArray, num_blocks: int) -> IntArray:
        """The first blocks of rows in a KV cache group: [len(rows), num_blocks]"""
        end = num_blocks * self._num_groups
        step = self._num_groups
        return self.block_tables[rows, group:end:step]

    def rows_of(self, req_ids: Sequence[str]) -> IntArray:
        """The rows of running requests: [len(req_ids)]"""
        return np.array([self._row_of(req_id) for req_id in req_ids], dtype=np.int64)

    def adapters_of(self, req_ids: Sequence[str]) -> list[str | None]:
        """The keys of the adapters of known requests."""
        return [self._known[req_id].adapter for req_id in req_ids]

    def num_tokens_of(self, rows: IntArray) -> IntArray:
        """The number of known tokens of each row: [len(rows)]"""
        return self._num_tokens[rows]

    def num_slots_of(self, rows: IntArray) -> IntArray:
        """The number of tokens that fit in the blocks of each row: [len(rows)]"""
        return self._num_blocks[rows] // self._num_groups * self._block_size

    def _slots(self, group: int, rows: IntArray, blocks: IntArray, offsets: IntArray) -> IntArray:
        """The slots of tokens, given by row, index of the block in it, and offset: [num_tokens]"""
        places = blocks if self._num_groups == 1 else blocks * self._num_groups + group
        return self.block_tables[rows, places] * self._block_size + offsets

    def _exclude_readers(
        self, is_uniform: BoolArray, plan: SchedulerOutput, rows: IntArray, seq_lens: IntArray
    ) -> None:
        """Mark sequences as not uniform if they read blocks that non-uniform sequences fill in this step.
        Sequences are in the order of the plan, which has newly admitted ones last: only those can have found
        such blocks."""
        num_admitted = len(plan.scheduled_new_reqs) + len(plan.scheduled_cached_reqs.resumed_req_ids)
        if not num_admitted or is_uniform.all():
            return
        num_full_before = self._num_computed[rows] // self._block_size * self._num_groups
        may_read = is_uniform & (num_full_before > 0)
        may_read[:-num_admitted] = False
        if not may_read.any():
            return
        num_full = seq_lens // self._block_size * self._num_groups
        filled: set[int] = set()
        for index in np.flatnonzero(~is_uniform | may_read).tolist():
            table = self.block_tables[rows[index]]
            start = num_full_before[index]
            if may_read[index]:
                if filled.isdisjoint(table[:start].tolist()):
                    continue
                is_uniform[index] = False
            filled.update(table[start : num_full[index]].tolist())
            filled.discard(_NULL_BLOCK)

    def sampling_batch(self, rows: IntArray, num_drafts: IntArray | None = None) -> SamplingBatch:
        """The parameters of the sampled rows, each of which has ``num_drafts`` more tokens than are known."""
        num_tokens: IntArray = self._num_tokens[rows]
        return self._sampling.batch(rows, num_tokens if num_drafts is None else num_tokens + num_drafts)

    def add_tokens(self, rows: IntArray, counts: IntArray | int = 1) -> IntArray:
        """Count new tokens of each row, and return the index of the first of them: [len(rows)]"""
        places: IntArray = self._num_tokens[rows]
        self._num_tokens[rows] += counts
        return places

    def _update_cached(self, cached: CachedRequestData, changes: RowChanges) -> None:
        for req_id in cached.resumed_req_ids:
            known = self._known[req_id]
            self._release_row(known)
            self._take_row(known, cached.resumed_token_ids[req_id], changes)
        rows = [self._row_of(req_id) for req_id in cached.req_ids]
        self._num_computed[rows] = cached.num_computed_tokens
        for row, start, token_ids in zip(
            rows, cached.num_computed_tokens, cached.new_token_ids, strict=bool(cached.new_token_ids)
        ):
            self._append_tokens(row, start, token_ids, changes)
        for row, block_ids in zip(rows, cached.new_block_ids, strict=True):
            if block_ids:
                self._append_blocks(row, block_ids, changes)

    def _add(self, new: NewRequestData, changes: RowChanges) -> None:
        assert new.req_id not in self._known, f"request {new.req_id} is already known"
        known = _Known(new.sampling_params, len(new.prompt_token_ids), new.adapter)
        self._known[new.req_id] = known
        self._num_told += known.params.prompt_logprobs is not None
        row = self._take_row(known, new.prompt_token_ids, changes)
        self._num_computed[row] = new.num_computed_tokens
        self._append_blocks(row, new.block_ids, changes)

    def _row_of(self, req_id: str) -> int:
        row = self._known[req_id].row
        assert row is not None, f"request {req_id} is preempted"
        return row

    def _take_row(self, known: _Known, token_ids: list[int], changes: RowChanges) -> int:
        row = self._free_rows.pop()
        known.row = row
        self._num_tokens[row] = len(token_ids)
        changes.tokens.append((row, token_ids))
        self._num_blocks[row] = 0
        # Shorter tables are padded to the longest of a step; the padding must name a real block.
        self.block_tables[row] = 0
        self._sampling.set_row(row, known.params, known.num_prompt_tokens)
        return row

    def _release_row(self, known: _Known) -> None:
        if known.row is not None:
            self._sampling.clear_row(known.row)
            self._free_rows.append(known.row)
            known.row = None

    def _append_tokens(self, row: int, start: int, token_ids: Sequence[int], changes: RowChanges) -> None:
        """Append the tokens, which begin at index ``start``; skip those already known."""
        num_known = int(self._num_tokens[row])
        if start + len(token_ids) > num_known:
            changes.new_tokens.append((row, num_known, token_ids[num_known - start :]))
            self._num_tokens[row] = start + len(token_ids)

    def _append_blocks(self, row: int, block_ids: list[int], changes: RowChanges) -> None:
        start = int(self._num_blocks[row])
        self.block_tables[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)
        changes.blocks.append((row, start, block_ids))


def _counted_up(counts: IntArray) -> IntArray:
    """0, 1, ..., count for each count: [sum(counts) + len(counts)]"""
    ends = np.cumsum(counts + 1)
    numbers: IntArray = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts - 1, counts + 1)
    return numbers


def _shortest_uniform_first(is_uniform: BoolArray, seq_lens: IntArray) -> IntArray:
    """The order of a step's sequences: uniform ones, shortest first, then the others in the order of the
    plan, which puts a sequence after those whose KV it reads."""
    if is_uniform.all():
        return seq_lens.argsort(kind="stable")
    return np.lexsort((np.where(is_uniform, seq_lens, 0), ~is_uniform))
