"""Sampling parameters as arrays, one row per request, and the slice of them that one step samples. No
torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.records.sampling_params import SamplingParams
from engine.worker.attention.backend import IntArray

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The requests sampled in one step; every array is [num_samples]."""

    greedy: BoolArray
    temperature: FloatArray
    top_p: FloatArray
    min_p: FloatArray
    top_k: IntArray
    """Number of best tokens to sample from; the vocabulary's size means all."""
    repetition_penalty: FloatArray
    presence_penalty: FloatArray
    frequency_penalty: FloatArray
    seeded: BoolArray
    seeds: IntArray
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    special: list[tuple[int, SamplingParams]]
    """Index and parameters of requests that use a rare feature (see ``is_special``)."""
    rows: IntArray
    """The requests' rows of the input batch."""

    @property
    def penalized(self) -> BoolArray:
        """[num_samples]"""
        penalties = (self.presence_penalty, self.frequency_penalty)
        changed: BoolArray = self.repetition_penalty != 1.0
        for penalty in penalties:
            changed |= penalty != 0.0
        return changed

    @property
    def takes_the_best(self) -> bool:
        """Whether every row is plain greedy sampling."""
        return bool(self.greedy.all()) and not self.special and not self.penalized.any()

    def tokens_of(self, index: int, token_ids: IntArray) -> tuple[IntArray, IntArray]:
        """Prompt and output tokens of one request, cut out of its row of ``token_ids``."""
        tokens = token_ids[self.rows[index]]
        prompt_end = int(self.num_prompt_tokens[index])
        return tokens[:prompt_end], tokens[prompt_end : prompt_end + int(self.num_output_tokens[index])]


def is_special(params: SamplingParams) -> bool:
    """Whether the sampler must process this request separately."""
    return (
        params.logprobs is not None
        or params.min_tokens > 0
        or params.logit_bias is not None
        or params.allowed_token_ids is not None
        or params.replay_token_ids is not None
        or bool(params.bad_words_token_ids)
    )


class SamplingTable:
    """The sampling parameters of every row, so that a step's batch is a few array look-ups."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperature = np.zeros(num_rows, dtype=np.float32)
        self._greedy = np.ones(num_rows, dtype=np.bool_)
        self._top_p = np.ones(num_rows, dtype=np.float32)
        self._min_p = np.zeros(num_rows, dtype=np.float32)
        self._top_k = np.full(num_rows, vocab_size, dtype=np.int64)
        self._repetition = np.ones(num_rows, dtype=np.float32)
        self._presence = np.zeros(num_rows, dtype=np.float32)
        self._frequency = np.zeros(num_rows, dtype=np.float32)
        self._seeded = np.zeros(num_rows, dtype=np.bool_)
        self._seeds = np.zeros(num_rows, dtype=np.int64)
        self._num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self._special: dict[int, SamplingParams] = {}

    def set_row(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> None:
        self._temperature[row] = params.temperature
        self._greedy[row] = params.greedy
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._top_k[row] = min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
        self._repetition[row] = params.repetition_penalty
        self._presence[row] = params.presence_penalty
        self._frequency[row] = params.frequency_penalty
        self._seeded[row] = params.seed is not None
        self._seeds[row] = params.seed or 0
        self._num_prompt_tokens[row] = num_prompt_tokens
        if is_special(params):
            self._special[row] = params

    def clear_row(self, row: int) -> None:
        self._special.pop(row, None)

    def batch(self, rows: IntArray, num_tokens: IntArray) -> SamplingBatch:
        """The parameters of the sampled ``rows``. ``num_tokens``: prompt and output tokens of each."""
        special = self._special
        return SamplingBatch(
            greedy=self._greedy[rows],
            temperature=self._temperature[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            top_k=self._top_k[rows],
            repetition_penalty=self._repetition[rows],
            presence_penalty=self._presence[rows],
            frequency_penalty=self._frequency[rows],
            seeded=self._seeded[rows],
            seeds=self._seeds[rows],
            num_prompt_tokens=self._num_prompt_tokens[rows],
            num_output_tokens=num_tokens - self._num_prompt_tokens[rows],
            special=[(i, special[row]) for i, row in enumerate(rows.tolist()) if row in special]
            if special
            else [],
            rows=rows,
        )
