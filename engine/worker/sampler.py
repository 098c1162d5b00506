"""Chooses the next token of every request of a step at once. Features that no request uses cost nothing.

The order is V1's: log-probabilities of the raw logits; allowed tokens, bad words, minimum length, bias;
grammars; penalties; greedy; temperature, min-p, top-k, top-p; one uniform draw per request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.records.messages import TokenLogprobs
from engine.records.row_failures import GRAMMAR_LEFT, NOT_NUMBERS, NOTHING_ALLOWED, processing_failed
from engine.records.sampling_params import SamplingParams
from engine.worker.attention.backend import IntArray
from engine.worker.sampling_batch import FloatArray, SamplingBatch

_MASKED = float("-inf")
_AS_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_PART = 512
"""Tokens per part when the best token is searched part by part."""
_MANY = 2**20
"""With fewer logits than this, a plain max is faster than the search by parts."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The tokens chosen in one step."""

    token_ids: IntArray
    """[num_samples]"""
    logprobs: dict[int, TokenLogprobs]
    """Log-probabilities by index, for the requests that want them."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """The error by index, for requests for which no token can be chosen; their entry in ``token_ids`` is a
    placeholder."""


@dataclass(frozen=True, slots=True)
class TokenBitmask:
    """The tokens that the grammars of some requests forbid."""

    indices: list[int]
    mask: npt.NDArray[np.bool_]
    """[len(indices), vocab_size]"""


@dataclass(frozen=True, slots=True)
class Picked:
    """One token per row, and the row's best logit after masks and penalties; -inf if no token is possible,
    NaN or infinity if the logits are not numbers. Both [num_samples]."""

    token_ids: IntArray
    best: FloatArray


class TokenPicker(Protocol):
    """Applies penalties and draws one token per row."""

    def pick(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        history: IntArray,
        draws: npt.NDArray[np.float64],
    ) -> Picked:
        """logits [num_samples, vocab_size], which may be overwritten; history: the tokens of all rows; draws
        [num_samples] in [0, 1), for the rows that are not greedy."""


class Sampler:
    """Samples tokens. Its only state is the random generator for requests without a seed."""

    def __init__(self, seed: int, picker: TokenPicker | None = None) -> None:
        """``picker``: torch's if none is given."""
        self._random = np.random.default_rng(seed % 2**64)
        self._picker = picker or TorchPicker()

    def sample(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        history: IntArray,
        forbidden: TokenBitmask | None = None,
    ) -> SamplerOutput:
        """Sample one token per row of logits [num_samples, vocab_size], which may be overwritten.
        ``history``: the tokens of all rows."""
        if forbidden is None and batch.takes_the_best:
            return SamplerOutput(_best(logits).cpu().numpy(), {}, _invalid_rows(logits))
        failed: dict[int, str] = {}
        wanted = [(i, params) for i, params in batch.special if params.logprobs is not None]
        raw_logprobs = logits[[i for i, _ in wanted]].float().log_softmax(dim=-1) if wanted else None
        if batch.special or forbidden is not None:
            failed = _invalid_rows(logits)
            logits = _masked(logits, batch, history, forbidden, failed)
        picked = self._picker.pick(logits, batch, history, self._draws(batch))
        _find_rows_without_token(picked.best, batch, forbidden, failed)
        for i, params in batch.special:
            _replay(picked.token_ids, params, int(batch.num_output_tokens[i]), i)
        if raw_logprobs is None:
            return SamplerOutput(picked.token_ids, {}, failed)
        chosen = picked.token_ids[[i for i, _ in wanted]]
        return SamplerOutput(picked.token_ids, _logprobs(raw_logprobs, chosen, wanted), failed)

    def _draws(self, batch: SamplingBatch) -> npt.NDArray[np.float64]:
        """[num_samples] in [0, 1): with a seed, a function of the seed and the output position only."""
        if batch.greedy.all():
            return np.zeros(len(batch.greedy))
        if batch.seeded.all():
            return uniform(batch.seeds, batch.num_output_tokens)
        free = self._random.random(len(batch.seeds))
        if not batch.seeded.any():
            return free
        return np.where(batch.seeded, uniform(batch.seeds, batch.num_output_tokens), free)


class TorchPicker:
    """Picks tokens by torch's operations, on any device."""

    def pick(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        history: IntArray,
        draws: npt.NDArray[np.float64],
    ) -> Picked:
        """See ``TokenPicker``."""
        logits = _penalize(logits.float(), batch, history)
        best: FloatArray = logits.amax(dim=-1).cpu().numpy()
        return Picked(_choose(logits, batch, draws).cpu().numpy(), best)


def _choose(logits: torch.Tensor, batch: SamplingBatch, draws: npt.NDArray[np.float64]) -> torch.Tensor:
    """The greedy token or the drawn one of each row: [num_samples]"""
    if batch.greedy.all():
        return _best(logits)
    if not batch.greedy.any():
        return _draw(logits, batch, np.arange(len(draws)), draws)
    random = np.flatnonzero(~batch.greedy)
    random_rows = torch.from_numpy(random).to(logits.device)
    token_ids = _best(logits)
    token_ids[random_rows] = _draw(logits[random_rows], batch, random, draws[random])
    return token_ids


def _masked(
    logits: torch.Tensor,
    batch: SamplingBatch,
    history: IntArray,
    forbidden: TokenBitmask | None,
    failed: dict[int, str],
) -> torch.Tensor:
    """The logits in fp32 after masks and biases of requests, and of grammars; adds rows to ``failed``."""
    logits = logits.float()
    for i, params in batch.special:
        try:
            _constrain(logits[i], params, batch, i, history)
        except Exception as error:  # only this request fails
            failed[i] = processing_failed("The sampling", error)
    if forbidden is not None:
        _forbid(logits, forbidden)
    return logits


def _invalid_rows(logits: torch.Tensor) -> dict[int, str]:
    """Errors of rows whose logits have no finite maximum. If the sum of all logits is finite, none of them is
    NaN or infinite; summing is far cheaper than checking each."""
    sums = logits.sum(dim=-1, dtype=torch.float32 if logits.dtype == torch.float16 else None)
    values: list[float] = sums.tolist()
    if math.isfinite(sum(values)):
        return {}
    suspects = [row for row, value in enumerate(values) if not math.isfinite(value)]
    return {row: NOT_NUMBERS for row in suspects if not _has_best(logits[row])}


def _has_best(row: torch.Tensor) -> bool:
    """Whether the maximum is finite: logits may be -inf, but not NaN or +inf."""
    return bool(row.max().isfinite())  # max propagates NaN


def _find_rows_without_token(
    best: FloatArray, batch: SamplingBatch, forbidden: TokenBitmask | None, failed: dict[int, str]
) -> None:
    """Add the rows in which masks have left no token to choose, or that hold no numbers."""
    if np.isfinite(best).all():
        return
    limited = dict.fromkeys([i for i, _ in batch.special], NOTHING_ALLOWED)
    limited |= dict.fromkeys(forbidden.indices if forbidden is not None else (), GRAMMAR_LEFT)
    replayed = {i for i, params in batch.special if _is_replayed(params, batch, i)}
    for i in np.flatnonzero(~np.isfinite(best)).tolist():
        if i not in failed and i not in replayed:
            failed[i] = limited.get(i, NOT_NUMBERS) if best[i] == _MASKED else NOT_NUMBERS


def _is_replayed(params: SamplingParams, batch: SamplingBatch, index: int) -> bool:
    """Whether a replay forces the next token, regardless of the masks."""
    replayed = params.replay_token_ids
    return replayed is not None and int(batch.num_output_tokens[index]) < len(replayed)


def _best(logits: torch.Tensor) -> torch.Tensor:
    """The best token of each row, the first of equal ones. Uses max, because argmax takes several times as
    long on a CPU."""
    as_integers = _AS_INTEGERS.get(logits.dtype)
    if as_integers is None or logits.device.type != "cpu" or logits.numel() < _MANY:
        return logits.max(dim=-1).indices
    return _best_by_parts(logits, logits.view(as_integers))


def _best_by_parts(logits: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
    """Like _best, in a tenth of the time: finds the best part of each row first. Non-negative floats have the
    same order as their bits read as integers, which a CPU compares many at once."""
    vocab_size = logits.shape[1]
    whole = vocab_size // _PART * _PART
    parts = integers[:, :whole].view(len(integers), -1, _PART).amax(dim=-1)
    if whole < vocab_size:
        parts = torch.cat((parts, integers[:, whole:].amax(dim=-1, keepdim=True)), dim=1)
    best, part = parts.max(dim=-1)
    if (best < 0).any():  # all logits of a row are negative: the order of their bits is reversed
        return logits.max(dim=-1).indices
    tokens = (part[:, None] * _PART + torch.arange(_PART)).clamp_(max=vocab_size - 1)
    best_of_part = logits.gather(1, tokens).max(dim=-1, keepdim=True).indices
    return tokens.gather(1, best_of_part)[:, 0]


def uniform(seeds: IntArray, positions: IntArray) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position)."""
    return (draw_keys(seeds, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_keys(seeds: IntArray, positions: IntArray) -> npt.NDArray[np.uint64]:
    """64 random bits per (seed, position), by the SplitMix64 mixing function."""
    return _mix(_mix(seeds.astype(np.uint64)) + positions.astype(np.uint64))


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _constrain(
    logits: torch.Tensor, params: SamplingParams, batch: SamplingBatch, index: int, history: IntArray
) -> None:
    """Apply one request's masks and bias to its row [vocab_size], in place."""
    if params.allowed_token_ids is not None:
        allowed = logits[params.allowed_token_ids]
        logits.fill_(_MASKED)
        logits[params.allowed_token_ids] = allowed
    if params.bad_words_token_ids:
        _, output = batch.tokens_of(index, history)
        banned = _completed_bad_words(params.bad_words_token_ids, output.tolist(), len(logits))
        if banned:
            logits[banned] = _MASKED
    if batch.num_output_tokens[index] < params.min_tokens:
        ending = list(params.ending_token_ids)
        if ending:
            logits[ending] = _MASKED
    if params.logit_bias:
        biases = torch.tensor(list(params.logit_bias.values()), device=logits.device)
        logits[list(params.logit_bias)] += biases


def _forbid(logits: torch.Tensor, forbidden: TokenBitmask) -> None:
    """Mask row by row and in place: gathering the rows of a large vocabulary costs more than masking them."""
    masks = torch.from_numpy(forbidden.mask).to(logits.device, non_blocking=True)
    for index, mask in zip(forbidden.indices, masks, strict=True):
        logits[index].masked_fill_(mask, _MASKED)


def _completed_bad_words(words: list[list[int]], output: list[int], vocab_size: int) -> list[int]:
    """The tokens that would complete a bad word at the end of this output."""
    return [
        word[-1]
        for word in words
        if word[-1] < vocab_size and (len(word) == 1 or output[-len(word) + 1 :] == word[:-1])
    ]


def _penalize(logits: torch.Tensor, batch: SamplingBatch, history: IntArray) -> torch.Tensor:
    """Apply the repetition penalty to prompt and output tokens; presence and frequency to output tokens."""
    penalized = np.flatnonzero(batch.penalized)
    if not len(penalized):
        return logits
    rows = torch.from_numpy(penalized).to(logits.device)
    part = logits[rows]
    histories = [batch.tokens_of(i, history) for i in penalized.tolist()]
    in_output = _count_tokens([output for _, output in histories], part)
    in_prompt = _count_tokens([prompt for prompt, _ in histories], part)

    repetition = _column(batch.repetition_penalty, penalized, logits)
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where(in_output + in_prompt > 0, repeated, part)
    part -= _column(batch.frequency_penalty, penalized, logits) * in_output
    part -= _column(batch.presence_penalty, penalized, logits) * (in_output > 0)
    logits[rows] = part
    return logits


def _count_tokens(sequences: list[IntArray], like: torch.Tensor) -> torch.Tensor:
    """How often each token occurs in each sequence: [num_sequences, vocab_size]"""
    vocab_size = like.shape[1]
    flat = np.concatenate([tokens + row * vocab_size for row, tokens in enumerate(sequences)])
    index = torch.from_numpy(flat).to(like.device)
    counts = torch.bincount(index, minlength=len(sequences) * vocab_size)
    return counts.view(len(sequences), vocab_size).to(like.dtype)


def _column(values: npt.NDArray[Any], rows: IntArray, like: torch.Tensor) -> torch.Tensor:
    """``values`` of the given rows as a column for logits: [num_rows, 1]"""
    return torch.from_numpy(values[rows]).to(like.device)[:, None]


def _draw(
    logits: torch.Tensor, batch: SamplingBatch, rows: IntArray, draws: npt.NDArray[np.float64]
) -> torch.Tensor:
    """Invert the distribution function at ``draws``; logits [num_rows, vocab_size] of ``rows``."""
    logits = logits / _column(batch.temperature, rows, logits)
    if (batch.min_p[rows] > 0.0).any():
        # In logits: p < min_p * max(p)  <=>  x < max(x) + log(min_p). log(0) keeps all.
        floor = logits.amax(dim=-1, keepdim=True) + _column(batch.min_p, rows, logits).log()
        logits = logits.masked_fill(logits < floor, _MASKED)
    logits = _keep_top(logits, batch.top_k[rows], batch.top_p[rows])
    probabilities = logits.softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    targets = torch.from_numpy(draws).to(logits.device, torch.float32)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[1] - 1)
    # A draw rounded up to the very end, or a scan that is not monotone, must not land on a masked token.
    possible = probabilities.gather(1, index) > 0
    return torch.where(possible, index, logits.argmax(dim=-1, keepdim=True))[:, 0]


def _keep_top(logits: torch.Tensor, top_k: IntArray, top_p: npt.NDArray[np.float32]) -> torch.Tensor:
    """Mask all but the ``top_k`` best tokens, then all beyond the share ``top_p`` of those; ties stay."""
    vocab_size = logits.shape[1]
    filtered = np.flatnonzero((top_k < vocab_size) | (top_p < 1.0))
    if not len(filtered):
        return logits
    rows = torch.from_numpy(filtered).to(logits.device)
    part = logits if len(filtered) == len(logits) else logits[rows]
    best = part.topk(int(top_k[filtered].max()), dim=-1).values
    last = _column(top_k, filtered, logits) - 1
    best = best.masked_fill(best < best.gather(1, last), _MASKED)
    if (top_p[filtered] < 1.0).any():
        share = _column(top_p, filtered, logits)
        probabilities = best.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        kept = ((before < share) | (share >= 1.0)).sum(dim=-1, keepdim=True)
        last = torch.minimum(last, kept.clamp_(min=1) - 1)
    masked = part.masked_fill(part < best.gather(1, last), _MASKED)
    if part is logits:
        return masked
    return logits.index_copy(0, rows, masked)


def _replay(token_ids: IntArray, params: SamplingParams, position: int, index: int) -> None:
    """Replace the chosen token by the forced one, as long as there are forced tokens."""
    forced = params.replay_token_ids
    if forced is not None and position < len(forced):
        token_ids[index] = forced[position]


def _logprobs(
    raw: torch.Tensor, chosen: IntArray, wanted: list[tuple[int, SamplingParams]]
) -> dict[int, TokenLogprobs]:
    """raw [num_wanted, vocab_size], chosen [num_wanted] -> by index, the chosen token, then the best."""
    counts = [params.logprobs or 0 for _, params in wanted]
    entries = ranked_logprobs(raw, torch.from_numpy(chosen).to(raw.device)[:, None], max(counts))
    return {
        index: TokenLogprobs(entry.token_ids[: count + 1], entry.logprobs[: count + 1], entry.rank)
        for (index, _), count, entry in zip(wanted, counts, entries, strict=True)
    }


def ranked_logprobs(logprobs: torch.Tensor, tokens: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
    """logprobs [num_rows, vocab_size], tokens [num_rows, 1] -> each row's token, then its ``num_top`` best"""
    own = logprobs.gather(1, tokens)
    ranks: list[int] = (logprobs >= own).sum(dim=-1).tolist()
    top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    ids: list[list[int]] = torch.cat((tokens, top.indices), dim=1).tolist()
    values: list[list[float]] = torch.cat((own, top.values), dim=1).tolist()
    return [TokenLogprobs(*entry) for entry in zip(ids, values, ranks, strict=True)]
