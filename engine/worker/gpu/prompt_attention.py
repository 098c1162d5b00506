"""Prefill attention: a prompt's many query tokens justify a library kernel over gathered, contiguous KV.

It chooses once the fastest installed kernel that computes correct results on this device. Layers that this
kernel does not support use the next one, and finally our Triton kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from engine.worker.gpu.prompt_paths.flash_attention_3 import FORWARD_ONLY, FULL, FlashAttention3
from engine.worker.gpu.prompt_paths.flashinfer_ragged import FlashInferRagged
from engine.worker.gpu.prompt_paths.gathered import GatheredPrompts, GatherScratch
from engine.worker.gpu.prompt_paths.path import AttentionKind, PromptPath, Prompts, groups_within
from engine.worker.gpu.prompt_paths.probe import Probe, ProvenPath
from engine.worker.gpu.prompt_paths.torch_varlen import TorchVarlen
from engine.worker.gpu.prompt_paths.two_parts import TwoParts
from engine.worker.gpu.step_batch import StepBatch

logger = logging.getLogger(__name__)

MIN_QUERY_TOKENS = 128
"""Mean query tokens per prompt below which a gather costs more than a faster kernel saves."""
MIN_GATHERED_TOKENS = 16384
"""The fewest tokens of KV that scratch memory for gathering holds, even if all sequences are short."""


class PromptAttention(Protocol):
    """Computes the prefill attention of a step, whose K and V are already in the pool."""

    def attend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        batch: StepBatch,
        *,
        scale: float,
        window: int | None,
        chunk: int | None = None,
        soft_cap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """keys, values [num_blocks, block_size, num_kv_heads, head_dim]: one layer's views of the pool;
        query [num_prompt_tokens, num_heads, head_dim] of ``batch.prompts`` only; result like query."""


class FastPromptAttention:
    """A PromptAttention that uses the first path that supports a layer, and ``fallback`` for the rest."""

    def __init__(
        self,
        paths: Sequence[ProvenPath],
        fallback: PromptAttention,
        max_gathered_tokens: int,
        min_query_tokens: int = MIN_QUERY_TOKENS,
    ) -> None:
        self._paths = tuple(paths)
        self._fallback = fallback
        self._max_gathered_tokens = max_gathered_tokens
        self._min_query_tokens = min_query_tokens
        self._step: torch.Tensor | None = None
        """The state of the current step; its KV cache groups share it."""
        self._groups: list[tuple[StepBatch, tuple[Prompts, ...]]] = []
        """Prompts of each KV cache group, with its batch."""

    def attend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        batch: StepBatch,
        *,
        scale: float,
        window: int | None,
        chunk: int | None = None,
        soft_cap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kind = AttentionKind(scale, window, soft_cap)
        is_known = sinks is None and chunk is None
        path = self._path_for(kind, len(query) / len(batch.prompts)) if is_known else None
        if path is None:
            return self._fallback.attend(
                keys,
                values,
                query,
                batch,
                scale=scale,
                window=window,
                chunk=chunk,
                soft_cap=soft_cap,
                sinks=sinks,
            )
        query = query.contiguous()  # transformers' code may give a transposed one
        parts = []
        token = 0
        for prompts in self._groups_of(batch):
            part = query[token : token + prompts.num_tokens]
            parts.append(path.attend(keys, values, part, prompts, kind))
            token += prompts.num_tokens
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _path_for(self, kind: AttentionKind, tokens_each: float) -> PromptPath | None:
        if tokens_each < self._min_query_tokens:
            return None
        return next((proven.path for proven in self._paths if proven.can(kind)), None)

    def _groups_of(self, batch: StepBatch) -> tuple[Prompts, ...]:
        """The prompts in groups that fit the gather buffer; computed at the first layer of each KV cache
        group in each step."""
        if batch.query_starts is not self._step:
            self._step = batch.query_starts
            self._groups.clear()
        for known, groups in self._groups:
            if known is batch:
                return groups
        chunks = groups_within(batch.prompts, self._max_gathered_tokens)
        made = tuple(Prompts.of(batch, group) for group in chunks)
        self._groups.append((batch, made))
        return made


def select_prompt_attention(
    pool: torch.Tensor,
    dtype: torch.dtype,
    max_model_len: int,
    kv_scale: float,
    fallback: PromptAttention,
    min_query_tokens: int = MIN_QUERY_TOKENS,
) -> PromptAttention:
    """The fastest prefill attention for ``pool`` [num_blocks, num_slots, 2, block_size, num_kv_heads,
    head_dim]; never fails. ``dtype``: of the queries; ``kv_scale``: of an 8-bit pool."""
    scratch = GatherScratch(pool, dtype, _gathered_tokens(max_model_len), kv_scale)
    probe = Probe.like(pool, dtype, kv_scale)
    paths: list[ProvenPath] = []
    for path in _installed(pool, dtype, scratch):
        proven = probe.prove(path)
        if proven is not None:
            paths.append(proven)
            if proven.can_all:
                break  # it supports every kind
    if not paths:
        logger.info("Using Triton prefill attention.")
        return fallback
    logger.info("Using prefill attention: %s.", ", ".join(proven.path.name for proven in paths))
    return FastPromptAttention(paths, fallback, scratch.max_tokens, min_query_tokens)


def _gathered_tokens(max_model_len: int) -> int:
    """The most tokens of KV gathered at a time: one layer of the longest sequence fits."""
    return max(max_model_len, MIN_GATHERED_TOKENS)


def _installed(pool: torch.Tensor, dtype: torch.dtype, scratch: GatherScratch) -> Iterator[PromptPath]:
    """The installed paths, fastest first."""
    finders: list[Callable[[], PromptPath]] = [
        lambda: GatheredPrompts(FlashAttention3.find(*FULL), scratch),
        lambda: GatheredPrompts(FlashAttention3.find(*FORWARD_ONLY), scratch),
        lambda: GatheredPrompts(FlashInferRagged.find(pool.device), scratch),
        *([TorchVarlen] if pool.dtype == dtype else []),
        lambda: GatheredPrompts(TwoParts(), scratch),
    ]
    for find in finders:
        try:
            yield find()
        except Exception as error:  # importing a library may raise anything
            logger.debug("Prefill attention library unavailable: %s", error)
