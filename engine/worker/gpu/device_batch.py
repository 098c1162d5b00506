"""The persistent batch on the device: token ids and block tables by row, updated by the deltas of each plan;
and the arrays of one step, sent to the device in one copy.

Sampled tokens are written into the rows on the device, so a step may be sent before the previous one is
done. Does not know the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.config import SchedulerConfig
from engine.core.outputs import SchedulerOutput
from engine.worker.attention.backend import IntArray
from engine.worker.gpu.device_sampler import DeviceSampler, DeviceSampling
from engine.worker.gpu.graph_sizes import GraphSizes
from engine.worker.gpu.staging import Staging, words_of
from engine.worker.gpu.step_batch import PromptChunk, StepBatch
from engine.worker.gpu.streams import DeviceStreams
from engine.worker.request_rows import RequestRows, StepRows
from engine.worker.sampling_batch import SamplingBatch

_NOWHERE = -1
"""Slot of a token whose K and V are not stored."""


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """The inputs of a forward pass, on the device."""

    batch: StepBatch
    input_places: torch.Tensor
    """[num_tokens] int64: index of each token in the flattened token ids of all rows."""
    graph_size: int | None
    """Number of sequences of the CUDA graph that computes this step; None: it runs eagerly."""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step whose inputs were sent to the device."""

    req_ids: list[str]
    sample_seqs: IntArray
    """[num_samples] on the host: indices of the sequences that are sampled."""
    arrays: TokenArrays
    sample_tokens: torch.Tensor
    """[num_samples] int64: indices of the tokens whose logits are sampled."""
    sampled_places: torch.Tensor
    """[num_samples] int64: where the sampled tokens go in the flattened token ids of all rows."""
    sampling: DeviceSampling


class DeviceBatch:
    """The rows of the requests, with their token ids and block tables on the device."""

    def __init__(
        self,
        limits: SchedulerConfig,
        max_model_len: int,
        block_size: int,
        graph_sizes: GraphSizes,
        sampler: DeviceSampler,
        device: torch.device,
        streams: DeviceStreams,
        num_groups: int = 1,
    ) -> None:
        """``num_groups``: of the model's KV cache."""
        max_num_seqs = limits.max_num_seqs
        self._rows = RequestRows(max_num_seqs, max_model_len, block_size, sampler.vocab_size, num_groups)
        self._num_groups = num_groups
        self._graph_sizes = graph_sizes
        self._sampler = sampler
        self._streams = streams
        self._block_size = block_size
        self._max_model_len = max_model_len
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = torch.zeros((max_num_seqs, max_model_len + 1), dtype=torch.int32, device=device)
        """[max_num_seqs, max_model_len + 1]"""
        tables = (num_groups, max_num_seqs, max_blocks)
        self.block_tables = torch.zeros(tables, dtype=torch.int32, device=device)
        """[num_groups, max_num_seqs, max_blocks]; entries past the end of a row are stale."""
        num_words = _step_words(limits, block_size, graph_sizes, num_groups)
        self._staging = Staging(num_words + sampler.staged_words(max_num_seqs), device, streams)

    def __len__(self) -> int:
        """Number of requests that have a row, preempted ones included."""
        return len(self._rows)

    def send(self, plan: SchedulerOutput) -> DeviceStep | None:
        """Apply a plan's deltas and send its step to the device; None if it has no tokens."""
        changes = self._rows.update(plan)
        for row, token_ids in changes.tokens:
            self._write_row(self.token_ids[row], token_ids)
        appended = []
        for row, start, block_ids in changes.blocks:
            if start == 0:  # a new request
                for group in range(self._num_groups):
                    self._write_row(self.block_tables[group, row], block_ids[group :: self._num_groups])
            else:
                appended.append((row, start, block_ids))
        if not plan.total_num_scheduled_tokens:
            return None
        step = self._rows.step_rows(plan, self._graph_sizes.uniform_len, writes_first=True)
        return self._send_step(step, appended)

    def send_idle(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> TokenArrays:
        """Inputs of a warm-up step, which reads the null block only and writes nothing; uniform first."""
        uniform_len = self._graph_sizes.uniform_len
        step = _idle_rows(np.array(query_lens), np.array(seq_lens), uniform_len, self._num_groups)
        self._staging.begin()
        arrays = self._put_tokens(step)
        self._staging.send()
        return arrays

    def send_sampling(self, batch: SamplingBatch) -> DeviceSampling:
        """Sampling parameters of a batch that is not part of a step, for warm-up."""
        self._staging.begin()
        sampling = self._sampler.stage(batch, self._staging)
        self._staging.send()
        return sampling

    def store_sampled(self, step: DeviceStep, token_ids: torch.Tensor) -> None:
        """Write the sampled tokens [num_samples] into the rows, where the next steps read them."""
        self.token_ids.view(-1).index_copy_(0, step.sampled_places, token_ids.to(torch.int32))

    def input_ids(self, arrays: TokenArrays) -> torch.Tensor:
        """Token ids of a step [num_tokens] int64."""
        return self.token_ids.view(-1).index_select(0, arrays.input_places).long()

    def _write_row(self, row: torch.Tensor, values: list[int]) -> None:
        row[: len(values)] = self._streams.upload(np.array(values, dtype=np.int32))

    def _send_step(self, step: StepRows, appended: list[tuple[int, int, list[int]]]) -> DeviceStep:
        staging = self._staging
        staging.begin()
        arrays = self._put_tokens(step)  # first: CUDA graphs need fixed addresses
        sample_rows = step.sample_rows
        sampling = self._sampler.stage(self._rows.sampling_batch(sample_rows), staging)
        sent = DeviceStep(
            req_ids=step.req_ids,
            sample_seqs=step.sample_seqs,
            arrays=arrays,
            sample_tokens=staging.put(step.sample_tokens, np.int64),
            sampled_places=staging.put(
                self._places(sample_rows, self._rows.add_tokens(sample_rows)), np.int64
            ),
            sampling=sampling,
        )
        places, block_ids = self._appended(appended)
        put_places, put_blocks = staging.put(places, np.int64), staging.put(block_ids, np.int32)
        staging.send()
        if block_ids:
            self.block_tables.view(-1).index_copy_(0, put_places, put_blocks)
        return sent

    def _appended(self, appended: list[tuple[int, int, list[int]]]) -> tuple[list[int], list[int]]:
        """Indices into the flattened block tables, and the block ids that go there."""
        num_groups, num_rows, width = self.block_tables.shape
        places = [
            (i % num_groups * num_rows + row) * width + i // num_groups
            for row, start, blocks in appended
            for i in range(start, start + len(blocks))
        ]
        return places, [block for _, _, blocks in appended for block in blocks]

    def _places(self, rows: IntArray, columns: IntArray) -> IntArray:
        """Indices into the flattened token ids of all rows."""
        return rows * (self._max_model_len + 1) + columns

    def _put_tokens(self, step: StepRows) -> TokenArrays:
        """The inputs of a forward pass, padded to the size of its CUDA graph if it has one."""
        num_seqs, uniform_len = len(step.rows), self._graph_sizes.uniform_len
        graph_size = self._graph_sizes.smallest(num_seqs) if step.num_uniform == num_seqs else None
        num_idle = 0 if graph_size is None else graph_size - num_seqs
        num_idle_tokens = num_idle * uniform_len
        starts = np.concatenate(([0], np.cumsum(_padded(step.query_lens, num_idle, uniform_len))))
        places = self._places(step.row_of_token, step.positions)
        put = self._staging.put
        batch = StepBatch(
            rows=put(_padded(step.rows, num_idle), np.int32),
            query_starts=put(starts, np.int32),
            seq_lens=put(_padded(step.seq_lens, num_idle), np.int32),
            block_tables=self.block_tables[0],
            positions=put(_padded(step.positions, num_idle_tokens), np.int64),
            slots=put(_padded(step.slots, num_idle_tokens, _NOWHERE), np.int64),
            num_uniform=step.num_uniform + num_idle,
            uniform_len=uniform_len,
            max_uniform_seq_len=_longest_uniform(step) if graph_size is None else self._max_model_len,
            prompts=_prompts(step, starts),
        )
        others = tuple(
            replace(
                batch,
                block_tables=self.block_tables[group],
                slots=put(_padded(slots, num_idle_tokens, _NOWHERE), np.int64),
            )
            for group, slots in enumerate(step.other_slots, 1)
        )
        if others:
            batch = replace(batch, other_groups=others)
        return TokenArrays(batch, put(_padded(places, num_idle_tokens), np.int64), graph_size)


def _padded(values: IntArray, num_more: int, value: int = 0) -> IntArray:
    return np.pad(values, (0, num_more), constant_values=value) if num_more else values


def _longest_uniform(step: StepRows) -> int:
    return int(step.seq_lens[: step.num_uniform].max(initial=0))


def _prompts(step: StepRows, starts: IntArray) -> tuple[PromptChunk, ...]:
    """The prompts of a step: the sequences after the uniform ones."""
    first = step.num_uniform
    if first == len(step.rows):
        return ()
    places = starts[first : len(step.rows)].tolist()
    lengths = zip(places, step.query_lens[first:].tolist(), step.seq_lens[first:].tolist(), strict=True)
    return tuple(PromptChunk(seq, *length) for seq, length in enumerate(lengths, first))


def _idle_rows(query_lens: IntArray, seq_lens: IntArray, uniform_len: int, num_groups: int) -> StepRows:
    """Sequences that all use row 0, store no KV and are not sampled."""
    ends = np.cumsum(query_lens)
    positions = np.arange(ends[-1]) + np.repeat(seq_lens - ends, query_lens)
    none, nowhere = np.empty(0, dtype=np.int64), np.full_like(positions, _NOWHERE)
    return StepRows(
        req_ids=[],
        num_uniform=int(np.count_nonzero(query_lens == uniform_len)),
        rows=np.zeros_like(query_lens),
        query_lens=query_lens,
        seq_lens=seq_lens,
        row_of_token=np.zeros_like(positions),
        positions=positions,
        slots=nowhere,
        other_slots=(nowhere,) * (num_groups - 1),
        sample_tokens=none,
        sample_seqs=none,
    )


def _step_words(limits: SchedulerConfig, block_size: int, graph_sizes: GraphSizes, num_groups: int) -> int:
    """The most 32-bit words that the inputs of a step take, without those of sampling."""
    num_seqs = max(limits.max_num_seqs, graph_sizes.largest)
    num_tokens = max(limits.max_num_batched_tokens, num_seqs * graph_sizes.uniform_len)
    num_blocks = num_groups * (limits.max_num_batched_tokens // block_size + limits.max_num_seqs)
    of_seqs = words_of(*[(num_seqs + 1, 4)] * 3, *[(num_seqs, 8)] * 2)
    of_tokens = words_of(*[(num_tokens, 8)] * (2 + num_groups))
    return of_seqs + of_tokens + words_of((num_blocks, 8), (num_blocks, 4))
