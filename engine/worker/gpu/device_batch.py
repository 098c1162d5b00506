"""The persistent batch on the device: token ids and block tables by row, updated by the deltas of each plan;
and the arrays of one step, sent to the device in one copy.

Sampled tokens are written into the rows on the device, so a step may be sent before the previous one is
done. Does not know the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.config.engine_config import SchedulerConfig
from engine.core.outputs import SchedulerOutput
from engine.worker.attention.backend import IntArray
from engine.worker.common_prefix import CommonPrefix, PrefixFinder
from engine.worker.gpu.device_sampler import DeviceSampler, DeviceSampling
from engine.worker.gpu.graph_sizes import GraphShape, GraphSizes
from engine.worker.gpu.staging import Staging, words_of
from engine.worker.gpu.step_batch import PREFIX_UNIT, SharedPrefix, StepBatch, prompts_of
from engine.worker.gpu.streams import DeviceStreams
from engine.worker.gpu.verification_steps import (
    NOWHERE,
    drafts_of_samples,
    graph_of,
    uniform_len_of,
    with_equal_lengths,
)
from engine.worker.prompt_logprobs import PromptRows, prompt_rows
from engine.worker.request_rows import RequestRows, StepRows
from engine.worker.sampling_batch import SamplingBatch
from engine.worker.verification import Verified, verify

if TYPE_CHECKING:
    from engine.worker.media.step_media import StepMedia


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """The inputs of a forward pass, on the device."""

    batch: StepBatch
    input_places: torch.Tensor
    """[num_tokens] int64: index of each token in the flattened token ids of all rows."""
    graph: GraphShape | None
    """The CUDA graph that computes this step; None: it runs eagerly."""
    axes: torch.Tensor | None = None
    """[3, num_tokens] positions of a step with tokens of media, for a model whose tokens have three."""


@dataclass(frozen=True, slots=True)
class SampledDrafts:
    """The drafts of a step, by its samples."""

    num_drafts: IntArray
    """[num_samples] number of drafts of the sequence up to each sample."""
    drafts: IntArray
    """[num_samples] the draft after which each sample is drawn, or KNOWN."""
    rows: IntArray
    """[num_samples]"""


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
    """[num_samples] int64: indices for the sampled tokens in the flattened token ids of all rows."""
    sampling: DeviceSampling
    sampled_drafts: SampledDrafts | None = None
    """None: there are no drafts."""
    prompts: Sequence[PromptRows] = ()
    """Tokens whose logits give log-probabilities of prompts, for requests that want them."""


class _Scattered(NamedTuple):
    """Numbers for a tensor on the device, and their indices in it, flattened."""

    places: list[int]
    values: list[int]


class DeviceBatch:
    """Keeps the rows of the requests, with their token ids and block tables on the device."""

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
        *,
        samples: bool = True,
        prefix_groups: Sequence[int] = (),
    ) -> None:
        """``num_groups``: of the model's KV cache. ``samples``: see ``RequestRows``. ``prefix_groups``: those
        whose layers attend to prefixes shared by sequences in a separate pass."""
        max_num_seqs = limits.max_num_seqs
        sizes = max_num_seqs, max_model_len, block_size, sampler.vocab_size, num_groups
        self._rows = RequestRows(*sizes, samples=samples)
        self._prefixes = PrefixFinder(self._rows, block_size, prefix_groups, PREFIX_UNIT)
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
        num_words += sampler.staged_words(most_samples(limits, graph_sizes.verified_len))
        self._staging = Staging(num_words, device, streams)

    media: StepMedia | None = None
    """Pictures and clips of the requests, for a model that reads them; set before the first step."""

    @property
    def finds_prefixes(self) -> bool:
        """Whether steps may have a shared prefix."""
        return self._prefixes.is_on

    def __len__(self) -> int:
        """Number of requests that have a row, preempted ones included."""
        return len(self._rows)

    def send(self, plan: SchedulerOutput) -> DeviceStep | None:
        """Apply a plan's deltas and send its step to the device; None if it has no tokens."""
        changes = self._rows.update(plan)
        if self.media is not None:
            self.media.update(plan)
        for row, token_ids in changes.tokens:
            self._write_row(self.token_ids[row], token_ids)
        for row, start, sampled in changes.new_tokens:
            self._write_row(self.token_ids[row, start:], list(sampled))
        appended = []
        for row, start, block_ids in changes.blocks:
            if start == 0:  # a new request
                for group in range(self._num_groups):
                    self._write_row(self.block_tables[group, row], block_ids[group :: self._num_groups])
            else:
                appended.append((row, start, block_ids))
        if not plan.total_num_scheduled_tokens:
            return None
        uniform_len = uniform_len_of(plan, self._graph_sizes.verified_len)
        step = self._rows.step_rows(plan, uniform_len, writes_first=True)
        media = self.media
        positions = None
        if media is not None:
            positions = media.begin_step(plan, step)
        prompts = prompt_rows(self._rows.prompts_told(plan), step, self._ids_of)
        is_special = bool(prompts) or (media is not None and media.are_placed)
        graph = None if is_special else graph_of(step, self._graph_sizes)
        if graph is not None:
            uniform_len = graph.uniform_len
            step = with_equal_lengths(step, uniform_len)
            positions = None if media is None else media.positions_of(step)
        prefix = self._prefixes.find(plan, step)
        sent = self._send_step(plan, step, positions, uniform_len, graph, prefix, appended)
        return replace(sent, prompts=prompts) if prompts else sent

    def _ids_of(self, row: int, start: int, count: int) -> IntArray:
        """Token ids of a row; the host waits for them."""
        ids: IntArray = self.token_ids[row, start : start + count].cpu().numpy().astype(np.int64)
        return ids

    def send_idle(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        uniform_len: int = 1,
        *,
        has_prefix: bool = False,
    ) -> TokenArrays:
        """Inputs of a warm-up step, which reads only the null block and writes nothing; uniform sequences
        first. ``has_prefix``: as if sequences shared a prefix, of 0 tokens."""
        step = _idle_rows(np.array(query_lens), np.array(seq_lens), uniform_len, self._num_groups)
        is_uniform = step.num_uniform == len(step.rows)
        graph = self._graph_sizes.smallest(len(step.rows), uniform_len) if is_uniform else None
        self._staging.begin()
        prefix = CommonPrefix(0, 0, np.zeros(step.num_uniform, dtype=np.bool_)) if has_prefix else None
        arrays = self._put_tokens(step, uniform_len, graph, prefix)
        self._staging.send()
        return arrays

    def send_sampling(self, batch: SamplingBatch) -> DeviceSampling:
        """Sampling parameters of a batch that is not part of a step, for warm-up."""
        self._staging.begin()
        sampling = self._sampler.stage(batch, self._staging)
        self._staging.send()
        return sampling

    def store_sampled(self, step: DeviceStep, token_ids: torch.Tensor) -> None:
        """Write the sampled tokens [num_samples] into the rows, where the next steps read them.

        In a step with drafts, each sample is written to the place that it was drawn for. Accepted drafts do
        not change, and samples after the first rejected draft are past the row's end once that is known.
        """
        self.token_ids.view(-1).index_copy_(0, step.sampled_places, token_ids.to(torch.int32))

    def input_ids(self, arrays: TokenArrays) -> torch.Tensor:
        """Token ids of a step [num_tokens] int64."""
        return self.token_ids.view(-1).index_select(0, arrays.input_places).long()

    def take_verified(self, sampled: SampledDrafts, token_ids: IntArray) -> Verified:
        """Compare the drafts of a step with the sampled tokens [num_samples], and extend the rows by the
        accepted ones. Call it before the next plan is sent."""
        verified = verify(sampled.num_drafts, sampled.drafts, token_ids)
        self._rows.add_tokens(sampled.rows[verified.starts], verified.counts)
        return verified

    def _write_row(self, row: torch.Tensor, values: list[int]) -> None:
        row[: len(values)] = self._streams.upload(np.array(values, dtype=np.int32))

    def _send_step(
        self,
        plan: SchedulerOutput,
        step: StepRows,
        positions: IntArray | None,
        uniform_len: int,
        graph: GraphShape | None,
        prefix: CommonPrefix | None,
        appended: list[tuple[int, int, list[int]]],
    ) -> DeviceStep:
        staging = self._staging
        staging.begin()
        # First: CUDA graphs need fixed addresses.
        arrays = self._put_tokens(step, uniform_len, graph, prefix, positions)
        sample_rows = step.sample_rows
        num_drafts = step.sample_drafts
        sampling = self._sampler.stage(self._rows.sampling_batch(sample_rows, num_drafts), staging)
        drafts = None
        if num_drafts is not None:
            drafts = SampledDrafts(num_drafts, drafts_of_samples(plan, step), sample_rows)
        columns = self._sampled_columns(sample_rows, num_drafts)
        sent = DeviceStep(
            req_ids=step.req_ids,
            sample_seqs=step.sample_seqs,
            arrays=arrays,
            sample_tokens=staging.put(step.sample_tokens, np.int64),
            sampled_places=staging.put(self._places(sample_rows, columns), np.int64),
            sampling=sampling,
            sampled_drafts=drafts,
        )
        self._send_scattered(self._appended(appended), self._drafted(plan))
        return sent

    def _sampled_columns(self, rows: IntArray, num_drafts: IntArray | None) -> IntArray:
        """Columns for the sampled tokens in their rows. Without drafts, the rows grow by them now; with
        drafts, once it is known how many are accepted."""
        if num_drafts is None:
            return self._rows.add_tokens(rows)
        columns: IntArray = self._rows.num_tokens_of(rows) + num_drafts
        return columns

    def _send_scattered(self, blocks: _Scattered, drafts: _Scattered) -> None:
        """Send the step, and write new blocks and drafts into the rows."""
        staged = [
            (
                target.view(-1),
                self._staging.put(part.places, np.int64),
                self._staging.put(part.values, np.int32),
            )
            for target, part in ((self.block_tables, blocks), (self.token_ids, drafts))
            if part.values
        ]
        self._staging.send()
        for flat, places, values in staged:
            flat.index_copy_(0, places, values)

    def _drafted(self, plan: SchedulerOutput) -> _Scattered:
        """The drafts of a plan, placed after the tokens of their rows."""
        places: list[int] = []
        values: list[int] = []
        for row, start, drafts in self._rows.places_of_drafts(plan):
            first = row * (self._max_model_len + 1) + start
            places += range(first, first + len(drafts))
            values += drafts
        return _Scattered(places, values)

    def _appended(self, appended: list[tuple[int, int, list[int]]]) -> _Scattered:
        """New block ids for the block tables."""
        num_groups, num_rows, width = self.block_tables.shape
        places = [
            (i % num_groups * num_rows + row) * width + i // num_groups
            for row, start, blocks in appended
            for i in range(start, start + len(blocks))
        ]
        return _Scattered(places, [block for _, _, blocks in appended for block in blocks])

    def _places(self, rows: IntArray, columns: IntArray) -> IntArray:
        """Indices into the flattened token ids of all rows."""
        return rows * (self._max_model_len + 1) + columns

    def _put_tokens(
        self,
        step: StepRows,
        uniform_len: int,
        graph: GraphShape | None,
        prefix: CommonPrefix | None,
        positions: IntArray | None = None,
    ) -> TokenArrays:
        """The inputs of a forward pass, padded to the size of its CUDA graph if it has one. ``positions``
        [num_tokens] or [3, num_tokens] replaces the step's own."""
        positions = step.positions if positions is None else positions
        axes = None if positions.ndim == 1 else self._streams.upload(positions)
        positions = positions if axes is None else step.positions
        num_idle = 0 if graph is None else graph.num_seqs - len(step.rows)
        num_idle_tokens = num_idle * uniform_len
        starts = np.concatenate(([0], np.cumsum(_padded(step.query_lens, num_idle, uniform_len))))
        places = self._places(step.row_of_token, step.positions)
        longest = int(step.seq_lens[: step.num_uniform].max(initial=0))
        put = self._staging.put
        batch = StepBatch(
            rows=put(_padded(step.rows, num_idle), np.int32),
            query_starts=put(starts, np.int32),
            seq_lens=put(_padded(step.seq_lens, num_idle), np.int32),
            block_tables=self.block_tables[0],
            positions=put(_padded(positions, num_idle_tokens), np.int64),
            slots=put(_padded(step.slots, num_idle_tokens, NOWHERE), np.int64),
            num_uniform=step.num_uniform + num_idle,
            uniform_len=uniform_len,
            max_uniform_seq_len=longest if graph is None else self._max_model_len,
            prompts=prompts_of(step, starts),
            prefix=None if prefix is None else self._put_prefix(prefix, num_idle),
        )
        others = tuple(
            replace(
                batch,
                block_tables=self.block_tables[group],
                slots=put(_padded(slots, num_idle_tokens, NOWHERE), np.int64),
            )
            for group, slots in enumerate(step.other_slots, 1)
        )
        if others:
            batch = replace(batch, other_groups=others)
        return TokenArrays(batch, put(_padded(places, num_idle_tokens), np.int64), graph, axes)

    def _put_prefix(self, prefix: CommonPrefix, num_idle: int) -> SharedPrefix:
        place = (prefix.row, prefix.num_tokens)
        lens = prefix.num_tokens * prefix.has_it
        return SharedPrefix(
            self._staging.put(place, np.int32), self._staging.put(_padded(lens, num_idle), np.int32)
        )


def _padded(values: IntArray, num_more: int, value: int = 0) -> IntArray:
    return np.pad(values, (0, num_more), constant_values=value) if num_more else values


def _idle_rows(query_lens: IntArray, seq_lens: IntArray, uniform_len: int, num_groups: int) -> StepRows:
    """Sequences that all use row 0, store no KV and are not sampled."""
    ends = np.cumsum(query_lens)
    positions = np.arange(ends[-1]) + np.repeat(seq_lens - ends, query_lens)
    none = np.empty(0, dtype=np.int64)
    nowhere = np.full_like(positions, NOWHERE)
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
    """The most 32-bit words that the inputs of a step take, without those for sampling."""
    num_seqs = max(limits.max_num_seqs, graph_sizes.largest)
    num_tokens = max(limits.max_num_batched_tokens, graph_sizes.most_tokens)
    num_samples = most_samples(limits, graph_sizes.verified_len)
    num_blocks = num_groups * (limits.max_num_batched_tokens // block_size + limits.max_num_seqs)
    of_seqs = words_of(*[(num_seqs + 1, 4)] * 4, (2, 4))
    of_tokens = words_of(*[(num_tokens, 8)] * (2 + num_groups))
    of_samples = words_of(*[(num_samples, 8)] * 2)
    scattered = words_of(*[(num_blocks, 8), (num_blocks, 4)], *[(num_samples, 8), (num_samples, 4)])
    return of_seqs + of_tokens + of_samples + scattered


def most_samples(limits: SchedulerConfig, verified_len: int) -> int:
    """The most samples of a step: after the last token of each request and after its drafts."""
    return min(limits.max_num_seqs * verified_len, limits.max_num_batched_tokens)
