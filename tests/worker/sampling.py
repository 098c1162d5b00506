"""A sampler with rows filled by hand, for comparisons with plain references."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.records.sampling_params import SamplingParams
from engine.worker.sampler import Sampler, SamplerOutput, TokenPicker
from engine.worker.sampling_batch import SamplingTable

VOCAB_SIZE = 64
_pickers: list[TokenPicker] = []
"""The picker of ``new_sampler``, if it is not torch's."""


@contextmanager
def picking_by(picker: TokenPicker) -> Iterator[None]:
    """Samplers that are made meanwhile use this picker."""
    _pickers.append(picker)
    yield
    _pickers.pop()


def new_sampler(seed: int) -> Sampler:
    return Sampler(seed, *_pickers[-1:])


@dataclass(slots=True)
class Row:
    """One request to sample: its parameters, its tokens, its logits."""

    params: SamplingParams
    logits: torch.Tensor
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    output: list[int] = field(default_factory=list)


def random_logits(seed: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def sample_rows(rows: list[Row], sampler: Sampler | None = None) -> SamplerOutput:
    """Samples all rows in one batch."""
    table = SamplingTable(len(rows), len(rows[0].logits))
    longest = max(len(row.prompt) + len(row.output) for row in rows)
    token_ids = np.zeros((len(rows), longest + 1), dtype=np.int64)
    num_tokens = np.zeros(len(rows), dtype=np.int64)
    for i, row in enumerate(rows):
        tokens = row.prompt + row.output
        token_ids[i, : len(tokens)] = tokens
        num_tokens[i] = len(tokens)
        table.set_row(i, row.params, len(row.prompt))
    batch = table.batch(np.arange(len(rows)), num_tokens)
    return (sampler or new_sampler(0)).sample(torch.stack([row.logits for row in rows]), batch, token_ids)


def frequencies(params: SamplingParams, logits: torch.Tensor, num_draws: int = 20000) -> torch.Tensor:
    """The share of each token in ``num_draws`` independent draws: [vocab_size]"""
    output = sample_rows([Row(params, logits)] * num_draws)
    counts = np.bincount(output.token_ids, minlength=VOCAB_SIZE)
    return torch.from_numpy(counts) / num_draws
