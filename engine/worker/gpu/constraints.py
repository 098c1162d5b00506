"""Per-request constraints on the logits: allowed tokens, bad words, minimum length, logit bias. Few requests
have any, so the host collects them one by one, and the device applies them all at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.records.sampling_params import SamplingParams
from engine.worker.gpu.streams import DeviceStreams
from engine.worker.sampling_batch import SamplingBatch

_MASKED = float("-inf")
_ANY_TOKEN = -1


@dataclass(frozen=True, slots=True)
class BadWords:
    """Bad words of several tokens. The last token is banned where the others are the end of a row."""

    places: torch.Tensor
    """[num_words] int64: index of the last token in the step's flattened logits."""
    rows: torch.Tensor
    """[num_words] int64."""
    num_tokens: torch.Tensor
    """[num_words] int64: number of tokens in the row."""
    beginnings: torch.Tensor
    """[num_words, longest] int64: the other tokens, last one first, padded with -1."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints of the requests sampled in one step. Places index its flattened logits; all int64."""

    restricted: torch.Tensor
    """[n] indices of the requests with a list of allowed tokens."""
    allowed: torch.Tensor
    """[n] places of the allowed tokens."""
    banned: torch.Tensor
    """[n] places."""
    bad_words: BadWords | None
    biased: torch.Tensor
    """[n] places."""
    biases: torch.Tensor
    """[n] float32."""

    @classmethod
    def of(cls, batch: SamplingBatch, vocab_size: int, streams: DeviceStreams) -> Constraints | None:
        """The constraints of a batch; None if no request has any."""
        lists = _Lists()
        for index, params in batch.special:
            lists.add(index, params, batch, vocab_size)
        return lists.upload(streams)


@dataclass(slots=True)
class _Lists:
    """Constraints of a step while they are collected on the host."""

    restricted: list[int] = field(default_factory=list)
    allowed: list[int] = field(default_factory=list)
    banned: list[int] = field(default_factory=list)
    words: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    """Place of the last token, row, number of tokens in the row, the other tokens backwards."""
    biased: list[int] = field(default_factory=list)
    biases: list[float] = field(default_factory=list)

    def add(self, index: int, params: SamplingParams, batch: SamplingBatch, vocab_size: int) -> None:
        first = index * vocab_size
        num_output_tokens = int(batch.num_output_tokens[index])
        if params.allowed_token_ids is not None:
            self.restricted.append(index)
            self.allowed += [first + token for token in params.allowed_token_ids]
        row = int(batch.rows[index])
        num_tokens = int(batch.num_prompt_tokens[index]) + num_output_tokens
        for word in params.bad_words_token_ids or ():
            if word[-1] >= vocab_size:
                continue  # its place would be in the next request's logits
            if len(word) == 1:
                self.banned.append(first + word[0])
            elif len(word) - 1 <= num_output_tokens:
                self.words.append((first + word[-1], row, num_tokens, word[-2::-1]))
        if num_output_tokens < params.min_tokens:
            self.banned += [first + token for token in params.ending_token_ids]
        for token, bias in (params.logit_bias or {}).items():
            self.biased.append(first + token)
            self.biases.append(bias)

    def upload(self, streams: DeviceStreams) -> Constraints | None:
        if not (self.restricted or self.banned or self.words or self.biased):
            return None
        return Constraints(
            restricted=_upload(self.restricted, streams),
            allowed=_upload(self.allowed, streams),
            banned=_upload(self.banned, streams),
            bad_words=self._upload_words(streams) if self.words else None,
            biased=_upload(self.biased, streams),
            biases=streams.upload(np.array(self.biases, dtype=np.float32)),
        )

    def _upload_words(self, streams: DeviceStreams) -> BadWords:
        places, rows, num_tokens, beginnings = zip(*self.words, strict=True)
        padded = np.full((len(beginnings), max(map(len, beginnings))), _ANY_TOKEN, dtype=np.int64)
        for line, beginning in zip(padded, beginnings, strict=True):
            line[: len(beginning)] = beginning
        return BadWords(
            places=_upload(list(places), streams),
            rows=_upload(list(rows), streams),
            num_tokens=_upload(list(num_tokens), streams),
            beginnings=streams.upload(padded),
        )


def _upload(numbers: list[int], streams: DeviceStreams) -> torch.Tensor:
    return streams.upload(np.array(numbers, dtype=np.int64))


def constrain(logits: torch.Tensor, constraints: Constraints, token_ids: torch.Tensor) -> torch.Tensor:
    """A float32 copy of logits [num_samples, vocab_size], constrained; token_ids [num_rows, ...]"""
    constrained = logits.float().clone(memory_format=torch.contiguous_format)
    flat = constrained.view(-1)
    allowed = flat[constraints.allowed]
    constrained.index_fill_(0, constraints.restricted, _MASKED)
    flat[constraints.allowed] = allowed
    if constraints.bad_words is not None:
        _ban_completed(flat, constraints.bad_words, token_ids)
    flat.index_fill_(0, constraints.banned, _MASKED)
    flat.index_add_(0, constraints.biased, constraints.biases)
    return constrained


def _ban_completed(flat: torch.Tensor, words: BadWords, token_ids: torch.Tensor) -> None:
    """Ban, in place, the last tokens of bad words that would be completed; flat [num_samples * vocab_size]"""
    back = torch.arange(1, words.beginnings.shape[1] + 1, device=flat.device)
    # The padding of a shorter word may point before the start of the row; the token there is not compared.
    places = (words.num_tokens[:, None] - back).clamp_(min=0)
    same = token_ids[words.rows[:, None], places] == words.beginnings
    complete = (same | (words.beginnings == _ANY_TOKEN)).all(dim=1)
    added = torch.zeros_like(complete, dtype=flat.dtype).masked_fill_(complete, _MASKED)
    flat.index_add_(0, words.places, added)
