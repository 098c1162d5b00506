"""Warm-up runs of steps of all kinds, which compile kernels and grow memory to its peak. They read only the
null block and write no KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.config.engine_config import SchedulerConfig
from engine.records.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.worker.common_prefix import MIN_SEQS
from engine.worker.gpu.device_batch import DeviceBatch, most_samples
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
"""Uses every feature that needs separate memory or kernels."""
LISTED = SamplingParams(top_k=20, top_p=0.95)
SEARCHED = SamplingParams(top_p=0.95)
"""The usual parameters: the sampler sorts the best tokens, or searches for the threshold (see MAX_LISTED)."""


@dataclass(frozen=True, slots=True)
class StepLengths:
    """Lengths of a step's sequences; those with ``uniform_len`` query tokens come first."""

    query_lens: list[int]
    seq_lens: list[int]
    uniform_len: int = 1
    has_prefix: bool = False
    """Whether the sequences share a prefix, of 0 tokens."""

    def __add__(self, other: StepLengths) -> StepLengths:
        return StepLengths(self.query_lens + other.query_lens, self.seq_lens + other.seq_lens)


def warm_up_steps(
    limits: SchedulerConfig, max_model_len: int, verified_len: int = 1, *, has_prefixes: bool = False
) -> Iterator[StepLengths]:
    """Yields a step of one token, whose linears have separate kernels; decode batches and prompts, alone and
    together, in contexts from short to long; with drafts, steps that verify them; then prompts of increasing
    length, at most doubled each time, up to the longest; then steps with a shared prefix."""
    budget = limits.max_num_batched_tokens
    short = min(_SHORT_PROMPT, budget, max_model_len)
    long = min(budget, max_model_len)
    num_decodes = min(limits.max_num_seqs, budget)
    num_beside = min(limits.max_num_seqs - 1, budget - short)
    yield _equal(1, 1, 1)
    for context in _doublings(_SHORT_CONTEXT, max_model_len):
        prompt = _equal(1, short, max(short, context))
        yield _equal(num_decodes, 1, context)
        yield from _verifications(limits, context, min(verified_len, budget, max_model_len))
        for num_seqs in {0, min(1, num_beside), num_beside}:
            yield _equal(num_seqs, 1, context) + prompt
    num_long = min(limits.max_num_seqs, budget // long)
    for num_tokens in _doublings(short, long):
        yield _equal(1, num_tokens, num_tokens)
    for num_seqs in _doublings(1, num_long):
        yield _equal(num_seqs, long, long)
    yield _equal(num_long, long, max_model_len)
    if has_prefixes and num_decodes >= MIN_SEQS:
        yield from _with_prefixes(limits, min(verified_len, budget, max_model_len))


def _with_prefixes(limits: SchedulerConfig, longest: int) -> Iterator[StepLengths]:
    """Steps of increasing numbers of sequences, which alone determine how the KV is split."""
    for length in (1, *_doublings(2, longest)) if longest > 1 else (1,):
        most = min(limits.max_num_seqs, limits.max_num_batched_tokens // length)
        for num_seqs in _doublings(MIN_SEQS, most) if most >= MIN_SEQS else ():
            yield StepLengths([length] * num_seqs, [length] * num_seqs, length, has_prefix=True)


def _verifications(limits: SchedulerConfig, context: int, longest: int) -> Iterator[StepLengths]:
    """Steps that verify drafts, of one sequence and of the most, with at most ``longest`` tokens each. The
    rows of a kernel's tile are a power of two, so other lengths need no other kernels."""
    for length in _doublings(2, longest) if longest > 1 else ():
        for num_seqs in sorted({1, min(limits.max_num_seqs, limits.max_num_batched_tokens // length)}):
            yield StepLengths([length] * num_seqs, [max(length, context)] * num_seqs, length)


@torch.inference_mode()
def run_warm_up(
    forward: Forward,
    batch: DeviceBatch,
    sampler: DeviceSampler,
    limits: SchedulerConfig,
    max_model_len: int,
    verified_len: int = 1,
) -> None:
    """Run all warm-up steps, with logits of one token; sample the most tokens with the usual and the most
    expensive parameters.

    ``verified_len``: 1 plus the most drafts of a request.
    """
    num_samples = most_samples(limits, verified_len)
    first = torch.zeros(1, dtype=torch.int64, device=batch.token_ids.device)
    has_prefixes = batch.finds_prefixes
    for lengths in warm_up_steps(limits, max_model_len, verified_len, has_prefixes=has_prefixes):
        arrays = batch.send_idle(
            lengths.query_lens, lengths.seq_lens, lengths.uniform_len, has_prefix=lengths.has_prefix
        )
        forward.run(arrays, first)
    ones = [1] * min(limits.max_num_seqs, limits.max_num_batched_tokens)
    tokens = torch.arange(num_samples, device=batch.token_ids.device) % len(ones)
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
    num_rows = len(batch.token_ids)
    table = SamplingTable(num_rows, sampler.vocab_size)
    for row in range(num_rows):
        table.set_row(row, params, 0)
    rows = np.arange(num_samples) % num_rows
    sampling = batch.send_sampling(table.batch(rows, np.full(num_samples, max_model_len)))
    forbidden = TokenBitmask(
        list(range(num_samples)), np.zeros((num_samples, sampler.vocab_size), dtype=np.bool_)
    )
    sampler.sample(logits, sampling, batch.token_ids, forbidden)


def _equal(num_seqs: int, query_len: int, seq_len: int) -> StepLengths:
    return StepLengths([query_len] * num_seqs, [seq_len] * num_seqs)


def _doublings(first: int, last: int) -> Iterator[int]:
    """Yield first, twice that, and so on, then ``last``."""
    while first < last:
        yield first
        first *= 2
    yield last
