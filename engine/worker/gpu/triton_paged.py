"""Paged attention by our Triton kernels: on CUDA, or anywhere in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from engine.worker.attention.backend import AttentionBatch
from engine.worker.attention.chosen_latents import ChosenTokens, LatentChoice, attend_sequences
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.attention.layer_places import LayerPlaces, one_table
from engine.worker.gpu.kv_splits import SCRATCH_BYTES, KvSplitter, SplitScratch, count_processors
from engine.worker.gpu.prompt_attention import PromptAttention
from engine.worker.gpu.prompt_paths.chosen import longest_of, sequences_of
from engine.worker.gpu.prompt_paths.latents import attend_latent_prompts
from engine.worker.gpu.step_batch import PromptChunk, StepBatch
from engine.worker.gpu.tiling import (
    latent_tiling,
    prefix_tiling,
    prompt_tiling,
    shared_bytes_of,
    uniform_tiling,
)
from engine.worker.gpu.triton_attention import (
    Pages,
    Scoring,
    attend_latents,
    attend_prefix,
    attend_uniform,
    write_kv,
)
from engine.worker.gpu.triton_prompt import TritonPromptAttention


class TritonPagedAttention:
    """A PagedKv over a pool [num_blocks, num_slots, num_vectors, block_size, num_kv_heads, head_dim].

    The launches of a step depend on the host's numbers in its StepBatch, never on the contents of tensors, so
    a CUDA graph can capture them, and no call makes the host wait.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        kv_scale: float = 1.0,
        choose_prompts: Callable[[PromptAttention], PromptAttention] | None = None,
        places: LayerPlaces | None = None,
    ) -> None:
        """``kv_scale``: of an 8-bit pool. ``choose_prompts`` receives the Triton prefill attention, the
        fallback, and returns the prefill attention to use. ``places``: by default, the layers are one KV
        cache group."""
        head_dim = pool.shape[-1]
        self.kv_scale = kv_scale
        self._pool = pool
        places = one_table(pool.shape[1]) if places is None else places
        self._pages = [Pages(pool[:, slot, 0], pool[:, slot, -1]) for _, slot, _ in places]
        self._groups = [group for group, _, _ in places]
        self._tiling = uniform_tiling(head_dim, pool.dtype)
        scratch = SplitScratch.allocate(head_dim, pool.device)
        num_processors = count_processors(pool.device)
        self._splitter = KvSplitter.for_few_queries(scratch, num_processors)
        self._shared_bytes = shared_bytes_of(pool.device)
        self._prefix_tiling = partial(prefix_tiling, head_dim=head_dim, dtype=pool.dtype)
        floor = TritonPromptAttention(
            prompt_tiling(head_dim, pool.dtype, self._shared_bytes),
            KvSplitter.for_prompts(scratch, num_processors),
            kv_scale,
        )
        self._prompts = floor if choose_prompts is None else choose_prompts(floor)
        self._chosen = ChosenTokens()
        self._batches: tuple[StepBatch, ...] = ()
        """The batch of each KV cache group."""

    @staticmethod
    def scratch_bytes(spec: KvCacheSpec, max_model_len: int) -> int:
        """Bytes allocated in addition to the pool."""
        return SCRATCH_BYTES

    def begin_step(self, batch: AttentionBatch) -> None:
        groups = [_on_device(one, self._pool.shape[3], self._pool.device) for one in batch.by_group]
        self.begin_device_step(replace(groups[0], other_groups=tuple(groups[1:])))

    def begin_device_step(self, batch: StepBatch) -> None:
        """Set the step that following calls belong to."""
        self._batches = batch.by_group
        self._chosen = ChosenTokens()

    def _batch_of(self, layer: int) -> StepBatch:
        assert self._batches, "a step begins first"
        return self._batches[self._groups[layer]]

    def slots_of(self, layer: int) -> torch.Tensor:
        """See PagedKv."""
        return self._batch_of(layer).slots

    def pages(self, layer: int) -> Pages:
        return self._pages[layer]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend."""
        self.write(layer, key, value)
        return self.attend_written(
            layer, query, scale=scale, window=window, chunk=chunk, soft_cap=soft_cap, sinks=sinks
        )

    def attend_latent(
        self,
        layer: int,
        query: torch.Tensor,
        latent: torch.Tensor,
        *,
        value_size: int,
        scale: float,
        choice: LatentChoice | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend. torch computes the attention of prompts, and of chosen latents."""
        latents = self._pages[layer].keys
        batch = self._batch_of(layer)
        scoring = Scoring(scale, kv_scale=self.kv_scale)
        self.write(layer, latent[:, None], latent[:, None])
        num_uniform = batch.num_uniform_tokens
        output = query.new_empty((*query.shape[:2], value_size))
        if choice is not None and longest_of(batch) > choice.top_k:
            sequences = sequences_of(batch, latents.shape[1])
            attend_sequences(
                output,
                latents,
                sequences,
                query,
                choice,
                self._chosen,
                value_size=value_size,
                scale=scale,
                kv_scale=self.kv_scale,
            )
            return output
        if num_uniform:
            num_rows = batch.uniform_len * query.shape[1]
            tiling = latent_tiling(num_rows, self._shared_bytes, latents.shape[3] - value_size)
            row_tiles = -(-num_rows // tiling.num_rows)
            splits = self._splitter.choose(
                num_programs=batch.num_uniform * row_tiles,
                num_rows=num_uniform * query.shape[1],
                longest=batch.max_uniform_seq_len,
            )
            decodes = slice(0, num_uniform)
            attend_latents(output[decodes], query[decodes], latents, batch, scoring, tiling, splits)
        attend_latent_prompts(output, query, latents, batch, scale, self.kv_scale)
        return output

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the step's key and value [num_tokens, num_kv_heads, head_dim] to their slots."""
        write_kv(self._pages[layer], key, value, self.slots_of(layer), self.kv_scale)

    def attend_written(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See PagedKv."""
        scoring = Scoring(scale, window, soft_cap, sinks, self.kv_scale, chunk)
        batch = self._batch_of(layer)
        num_uniform = batch.num_uniform_tokens
        if not num_uniform:
            return self._attend_prompts(layer, query, scoring)
        output = query.new_empty(query.shape)
        self._attend_uniform(layer, query[:num_uniform], scoring, output[:num_uniform])
        if batch.prompts:
            output[num_uniform:] = self._attend_prompts(layer, query[num_uniform:], scoring)
        return output

    def _attend_uniform(
        self, layer: int, query: torch.Tensor, scoring: Scoring, output: torch.Tensor
    ) -> None:
        batch = self._batch_of(layer)
        pages = self._pages[layer]
        sizes = {
            "num_programs": batch.num_uniform * pages.keys.shape[2],
            "num_rows": query.shape[0] * query.shape[1],
            "longest": scoring.num_seen(batch.max_uniform_seq_len, batch.uniform_len),
        }
        both = None
        if batch.prefix is not None and scoring.sees_all:
            both = self._splitter.choose_beside_prefix(**sizes)
        if both is None:
            splits = self._splitter.choose(**sizes)
        else:
            splits, of_prefix = both
            tiling = self._prefix_tiling(sizes["num_rows"] // pages.keys.shape[2])
            attend_prefix(query, pages, batch, scoring, tiling, of_prefix)
        attend_uniform(output, query, pages, batch, scoring, self._tiling, splits)

    def _attend_prompts(self, layer: int, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        return self._prompts.attend(
            *self._pages[layer],
            query,
            self._batch_of(layer),
            scale=scoring.scale,
            window=scoring.window,
            chunk=scoring.chunk,
            soft_cap=scoring.soft_cap,
            sinks=scoring.sinks,
        )


def _on_device(batch: AttentionBatch, block_size: int, device: torch.device) -> StepBatch:
    """The batch as a StepBatch on the device; sequences with one token are the uniform ones."""
    ends = np.cumsum(batch.query_lens)
    lengths = zip(ends - batch.query_lens, batch.query_lens, batch.seq_lens, strict=True)
    chunks = [
        PromptChunk(seq, int(start), int(query_len), int(seq_len))
        for seq, (start, query_len, seq_len) in enumerate(lengths)
    ]
    seq_of_token = np.repeat(np.arange(len(ends)), batch.query_lens)
    positions = np.arange(len(seq_of_token)) + (batch.seq_lens - ends)[seq_of_token]

    def as_int32(array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(device, non_blocking=True)

    return StepBatch(
        rows=torch.arange(len(ends), dtype=torch.int32, device=device),
        query_starts=as_int32(np.concatenate(([0], ends))),
        seq_lens=as_int32(batch.seq_lens),
        block_tables=as_int32(batch.block_tables),
        positions=torch.from_numpy(positions).to(device, non_blocking=True),
        slots=torch.from_numpy(batch.slot_blocks * block_size + batch.slot_offsets).to(
            device, non_blocking=True
        ),
        num_uniform=batch.num_decodes,
        uniform_len=1,
        max_uniform_seq_len=max((chunk.seq_len for chunk in chunks[: batch.num_decodes]), default=0),
        prompts=tuple(chunks[batch.num_decodes :]),
    )
