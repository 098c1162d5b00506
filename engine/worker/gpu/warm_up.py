"""Warm-up runs of steps of all kinds, which compile kernels and grow memory to its peak. They read the null
block only and write no KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import SchedulerConfig
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.worker.gpu.device_batch import DeviceBatch
from engine.worker.gpu.device_sampler import DeviceSampler
from engine.worker.gpu.forward import Forward
from engine.worker.sampler import TokenBitmask
from engine.worker.sampling_batch import SamplingTable

_SHORT_CONTEXT = 128
_SHORT_PROMPT = 16
EXPENSIVE = SamplingParams(
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logprobs=MAX_LOGPROBS,
    logit_bias={0: 1.0},
    bad_words_token_ids=[[0, 0]],
)
"""Uses every feature that needs memory or kernels of its own."""
LISTED, SEARCHED = SamplingParams(top_k=20, top_p=0.95), SamplingParams(top_p=0.95)
"""The usual parameters: the best tokens are sorted, or the threshold is searched for (see MAX_LISTED)."""


@dataclass(frozen=True, slots=True)
class StepLengths:
    """Lengths of a step's sequences; those with a single query token come first."""

    query_lens: list[int]
    seq_lens: list[int]

    def __add__(self, other: StepLengths) -> StepLengths:
        return StepLengths(self.query_lens + other.query_lens, self.seq_lens + other.seq_lens)


def warm_up_steps(limits: SchedulerConfig, max_model_len: int) -> Iterator[StepLengths]:
    """Decode batches and prompts, alone and together, from short to long; then the largest prompts."""
    budget = limits.max_num_batched_tokens
    short, long = min(_SHORT_PROMPT, budget, max_model_len), min(budget, max_model_len)
    num_decodes = min(limits.max_num_seqs, budget)
    num_beside = min(limits.max_num_seqs - 1, budget - short)
    for context in _doublings(_SHORT_CONTEXT, max_model_len):
        prompt = _equal(1, short, max(short, context))
        yield _equal(num_decodes, 1, context)
        for num_seqs in {0, min(1, num_beside), num_beside}:
            yield _equal(num_seqs, 1, context) + prompt
    num_long = min(limits.max_num_seqs, budget // long)
    for seq_len in (long, max_model_len):
        yield _equal(num_long, long, seq_len)


@torch.inference_mode()
def run_warm_up(
    forward: Forward, batch: DeviceBatch, sampler: DeviceSampler, limits: SchedulerConfig, max_model_len: int
) -> None:
    """Run all warm-up steps; sample the most requests with the usual and the most expensive parameters."""
    num_samples = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    none = torch.empty(0, dtype=torch.int64, device=batch.token_ids.device)
    for lengths in warm_up_steps(limits, max_model_len):
        forward.run(batch.send_idle(lengths.query_lens, lengths.seq_lens), none)
    ones = [1] * num_samples
    tokens = torch.arange(num_samples, device=batch.token_ids.device)
    for params in (LISTED, SEARCHED, EXPENSIVE):
        logits = forward.run(batch.send_idle(ones, ones), tokens)
        _sample(logits, params, batch, sampler, max_model_len)


def _sample(
    logits: torch.Tensor,
    params: SamplingParams,
    batch: DeviceBatch,
    sampler: DeviceSampler,
    max_model_len: int,
) -> None:
    """Sample from logits [num_samples, vocab_size], every request at its maximum length."""
    num_samples = len(logits)
    table = SamplingTable(num_samples, sampler.vocab_size)
    for row in range(num_samples):
        table.set_row(row, params, 0)
    rows = np.arange(num_samples)
    sampling = batch.send_sampling(table.batch(rows, np.full(num_samples, max_model_len)))
    forbidden = TokenBitmask(rows.tolist(), np.zeros((num_samples, sampler.vocab_size), dtype=np.bool_))
    sampler.sample(logits, sampling, batch.token_ids, forbidden)


def _equal(num_seqs: int, query_len: int, seq_len: int) -> StepLengths:
    return StepLengths([query_len] * num_seqs, [seq_len] * num_seqs)


def _doublings(first: int, last: int) -> Iterator[int]:
    """Yield first, twice that, and so on, then ``last``."""
    while first < last:
        yield first
        first *= 2
    yield last
