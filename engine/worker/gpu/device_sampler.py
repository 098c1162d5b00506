"""Samples the next tokens of a step on the device, without making the host wait.

Semantics and order are those of ``engine.worker.sampler``; ``sampling_ops`` defines how a token is drawn. The
host knows the sampling parameters of each request, so features that no request of a step uses cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.worker.gpu.constraints import Constraints, constrain
from engine.worker.gpu.sampling_ops import SamplingOps
from engine.worker.gpu.staging import Staging, words_of
from engine.worker.gpu.streams import DeviceStreams
from engine.worker.sampler import TokenBitmask, draw_keys
from engine.worker.sampling_batch import SamplingBatch

MAX_LISTED = 1024
"""Up to this top-k, the best tokens are sorted; above it, the filters search for their threshold."""
_MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of the requests that have any; tensors [num_penalized]."""

    indices: torch.Tensor
    """Indices among the samples, int64."""
    rows: torch.Tensor
    num_prompt_tokens: torch.Tensor
    num_tokens: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    max_num_tokens: int


@dataclass(frozen=True, slots=True)
class Filters:
    """Top-k, top-p and min-p of the requests that use any; tensors [num_filtered]."""

    indices: torch.Tensor
    """Indices among the samples, int64."""
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    max_top_k: int


@dataclass(frozen=True, slots=True)
class Draws:
    """Temperatures and random keys of a step in which some request is not greedy."""

    temperature: torch.Tensor
    """[num_samples] float32; 0: greedy."""
    keys: torch.Tensor
    """[num_samples, 2] int32: keys of the random numbers."""
    filters: Filters | None


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """The requests whose log-probabilities are returned."""

    samples: list[int]
    """[num_wanted] indices among the samples."""
    counts: list[int]
    """[num_wanted] numbers of alternatives."""
    indices: torch.Tensor
    """A copy of ``samples`` on the device, int64."""


@dataclass(frozen=True, slots=True)
class DeviceSampling:
    """Sampling parameters of one step; a feature that no request uses is None."""

    draws: Draws | None = None
    penalties: Penalties | None = None
    constraints: Constraints | None = None
    logprobs: WantedLogprobs | None = None
    forced: torch.Tensor | None = None
    """[num_samples] int64: the token that replaces the sampled one; -1: none."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the requests that want them: the sampled token, then the best ones."""

    token_ids: torch.Tensor
    """[num_wanted, 1 + max_count] int64."""
    values: torch.Tensor
    """[num_wanted, 1 + max_count] float32."""
    ranks: torch.Tensor
    """[num_wanted] int64: rank of the sampled token; the best is 1."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled tokens of one step, on the device."""

    token_ids: torch.Tensor
    """[num_samples] int64."""
    logprobs: Logprobs | None
    scores: torch.Tensor | None = None
    """[num_samples] scores of the tokens before any was forced. Not finite where no token could be drawn (see
    SamplingOps.draw). None if this rank did not sample."""


class DeviceSampler:
    """The sampler; its only state is the random generator for requests without a seed."""

    def __init__(self, seed: int, vocab_size: int, ops: SamplingOps, streams: DeviceStreams) -> None:
        self._random = np.random.default_rng(seed % 2**64)
        self.vocab_size = vocab_size
        self._ops = ops
        self._streams = streams

    @staticmethod
    def staged_words(max_num_seqs: int) -> int:
        """The most 32-bit words that ``stage`` puts."""
        narrow = (max_num_seqs, 4)
        wide = (max_num_seqs, 8)
        draws = (narrow, wide, wide, narrow, narrow, narrow)
        penalties = (wide, *(narrow,) * 6)
        return words_of(*draws, *penalties)

    def stage(self, batch: SamplingBatch, staging: Staging) -> DeviceSampling:
        """Put the sampling parameters of ``batch`` into the staging buffer, sent with the step."""
        if batch.takes_the_best:
            return DeviceSampling()
        return DeviceSampling(
            draws=None if batch.greedy.all() else self._stage_draws(batch, staging),
            penalties=_stage_penalties(batch, staging),
            constraints=Constraints.of(batch, self.vocab_size, self._streams),
            logprobs=_wanted_logprobs(batch, self._streams),
            forced=_forced(batch, self._streams),
        )

    def sample(
        self,
        logits: torch.Tensor,
        sampling: DeviceSampling,
        token_ids: torch.Tensor,
        forbidden: TokenBitmask | None = None,
    ) -> Sampled:
        """Sample from logits [num_samples, vocab_size], which may be overwritten; token_ids [num_rows, n]"""
        wanted = sampling.logprobs
        raw = None if wanted is None else logits[wanted.indices].float().log_softmax(dim=-1)
        if sampling.constraints is not None:
            logits = constrain(logits, sampling.constraints, token_ids)
        if forbidden is not None:
            self._forbid(logits, forbidden)
        if sampling.penalties is not None:
            logits = _penalize(logits.float(), sampling.penalties, token_ids)
        if sampling.draws is None:
            scores, chosen = logits.max(dim=-1)
        else:
            chosen, scores = self._draw(logits, sampling.draws)
        if sampling.forced is not None:
            forced = sampling.forced >= 0
            chosen = torch.where(forced, sampling.forced, chosen)
            scores = scores.masked_fill(forced & (scores == _MASKED), 0.0)  # forced even if it is masked
        if wanted is None or raw is None:
            return Sampled(chosen, None, scores)
        return Sampled(chosen, _logprobs(raw, chosen[wanted.indices], max(wanted.counts)), scores)

    def _stage_draws(self, batch: SamplingBatch, staging: Staging) -> Draws:
        num_samples = len(batch.greedy)
        keys = self._random.integers(2**64, size=num_samples, dtype=np.uint64)
        if batch.seeded.any():
            keys = np.where(batch.seeded, draw_keys(batch.seeds, batch.num_output_tokens), keys)
        return Draws(
            temperature=staging.put(np.where(batch.greedy, 0.0, batch.temperature), np.float32),
            keys=staging.put(keys.view(np.int32), np.int32).view(num_samples, 2),
            filters=self._stage_filters(batch, staging),
        )

    def _stage_filters(self, batch: SamplingBatch, staging: Staging) -> Filters | None:
        filtered = (batch.top_k < self.vocab_size) | (batch.top_p < 1.0) | (batch.min_p > 0.0)
        indices = np.flatnonzero(filtered & ~batch.greedy)
        if not len(indices):
            return None
        return Filters(
            indices=staging.put(indices, np.int64),
            top_k=staging.put(batch.top_k[indices], np.int32),
            top_p=staging.put(batch.top_p[indices], np.float32),
            min_p=staging.put(batch.min_p[indices], np.float32),
            max_top_k=int(batch.top_k[indices].max()),
        )

    def _forbid(self, logits: torch.Tensor, forbidden: TokenBitmask) -> None:
        """Mask the forbidden tokens, in place."""
        indices = self._streams.upload(np.array(forbidden.indices, dtype=np.int64))
        mask = self._streams.upload(forbidden.mask)
        logits[indices] = logits[indices].masked_fill(mask, _MASKED)

    def _draw(self, logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        floors = torch.full_like(draws.temperature, _MASKED)
        if draws.filters is not None:
            floors.index_copy_(
                0, draws.filters.indices, self._floors(logits, draws.temperature, draws.filters)
            )
        return self._ops.draw(logits, draws.temperature, floors, draws.keys)

    def _floors(self, logits: torch.Tensor, temperature: torch.Tensor, filters: Filters) -> torch.Tensor:
        """See SamplingOps.floors: [num_filtered]"""
        part = logits[filters.indices]
        temperature = temperature[filters.indices]
        if filters.max_top_k <= MAX_LISTED:
            return _floors_of_best(part, temperature, filters)
        return self._ops.floors(part, temperature, filters.top_k, filters.top_p, filters.min_p)


def _floors_of_best(logits: torch.Tensor, temperature: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The floors if every top-k is small, by sorting: [num_filtered]"""
    best = logits.float().topk(filters.max_top_k, dim=-1).values / temperature[:, None]
    floor = best[:, 0] + filters.min_p.log()
    kth = best.gather(1, filters.top_k.long()[:, None] - 1)[:, 0]
    best = best.masked_fill(best < torch.maximum(floor, kth)[:, None], _MASKED)
    probabilities = best.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    share = filters.top_p[:, None]
    kept = ((before < share) | (share >= 1.0)) & (best > _MASKED)
    return best.gather(1, kept.sum(dim=-1, keepdim=True).clamp_(min=1) - 1)[:, 0]


def _stage_penalties(batch: SamplingBatch, staging: Staging) -> Penalties | None:
    indices = np.flatnonzero(batch.penalized)
    if not len(indices):
        return None
    num_prompt_tokens = batch.num_prompt_tokens[indices]
    num_tokens = num_prompt_tokens + batch.num_output_tokens[indices]
    return Penalties(
        indices=staging.put(indices, np.int64),
        rows=staging.put(batch.rows[indices], np.int32),
        num_prompt_tokens=staging.put(num_prompt_tokens, np.int32),
        num_tokens=staging.put(num_tokens, np.int32),
        repetition=staging.put(batch.repetition_penalty[indices], np.float32),
        presence=staging.put(batch.presence_penalty[indices], np.float32),
        frequency=staging.put(batch.frequency_penalty[indices], np.float32),
        max_num_tokens=int(num_tokens.max()),
    )


def _penalize(logits: torch.Tensor, penalties: Penalties, token_ids: torch.Tensor) -> torch.Tensor:
    """Apply repetition over prompt and output, presence and frequency over the output."""
    part = logits[penalties.indices]
    tokens = token_ids[penalties.rows, : penalties.max_num_tokens].long()
    places = torch.arange(penalties.max_num_tokens, device=logits.device)
    seen = places < penalties.num_tokens[:, None]
    generated = seen & (places >= penalties.num_prompt_tokens[:, None])
    in_all = torch.zeros_like(part).scatter_add_(1, tokens, seen.float())
    in_output = torch.zeros_like(part).scatter_add_(1, tokens, generated.float())

    repetition = penalties.repetition[:, None]
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where(in_all > 0, repeated, part)
    part -= penalties.frequency[:, None] * in_output
    part -= penalties.presence[:, None] * (in_output > 0)
    return logits.index_copy(0, penalties.indices, part)


def _forced(batch: SamplingBatch, streams: DeviceStreams) -> torch.Tensor | None:
    """See DeviceSampling.forced."""
    forced = np.full(len(batch.greedy), -1, dtype=np.int64)
    for index, params in batch.special:
        replayed = params.replay_token_ids
        position = int(batch.num_output_tokens[index])
        if replayed is not None and position < len(replayed):
            forced[index] = replayed[position]
    return streams.upload(forced) if (forced >= 0).any() else None


def _wanted_logprobs(batch: SamplingBatch, streams: DeviceStreams) -> WantedLogprobs | None:
    wanted = {index: params.logprobs for index, params in batch.special if params.logprobs is not None}
    if not wanted:
        return None
    samples = list(wanted)
    return WantedLogprobs(samples, list(wanted.values()), streams.upload(np.array(samples, dtype=np.int64)))


def _logprobs(raw: torch.Tensor, chosen: torch.Tensor, max_count: int) -> Logprobs:
    """raw [num_wanted, vocab_size], chosen [num_wanted]"""
    own = raw.gather(1, chosen[:, None])
    best = raw.topk(min(max_count, raw.shape[1]), dim=-1)
    return Logprobs(
        token_ids=torch.cat((chosen[:, None], best.indices), dim=1),
        values=torch.cat((own, best.values), dim=1),
        ranks=(raw >= own).sum(dim=-1),
    )
