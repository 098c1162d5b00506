"""SamplingOps in plain torch, with the same random numbers as the Triton kernels, bit for bit."""

from __future__ import annotations

import torch

GOLDEN_RATIO = 0x9E3779B9
FIRST_FACTOR = 0x7FEB352D
SECOND_FACTOR = 0x846CA68B
"""Constants of the hash function ``lowbias32`` (C. Wellons, "Prospecting for Hash Functions", 2018)."""
SERIES_LIMIT = 0.01
"""Below this, a series is more exact for -log(1 - u) than computing 1 - u with 24 bits."""
LARGEST_BELOW_ONE = 1.0 - 2.0**-24


class TorchSamplingOps:
    """SamplingOps in plain torch."""

    def draw(
        self, logits: torch.Tensor, temperature: torch.Tensor, floors: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See SamplingOps."""
        scaled = _scaled(logits, temperature)
        tokens = torch.arange(logits.shape[1], device=logits.device)
        noise = -exponential(random_bits(keys, tokens)).log()
        noisy = torch.where(temperature[:, None] > 0, scaled + noise, scaled)
        scores, tokens = noisy.masked_fill(scaled < floors[:, None], float("-inf")).max(dim=-1)
        return tokens, scores

    def floors(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
    ) -> torch.Tensor:
        """See SamplingOps."""
        scaled = _scaled(logits, temperature)
        best = scaled.amax(dim=-1)
        lowest = sort_keys(best + min_p.log())
        highest = sort_keys(best)
        keys = sort_keys(scaled)
        kth = _search(keys, torch.ones_like(scaled), top_k, lowest, highest)
        lowest = torch.where(top_k < logits.shape[1], kth, lowest)
        mass = (scaled - best[:, None]).exp().masked_fill(keys < lowest[:, None], 0.0)
        nucleus = _search(keys, mass, top_p * mass.sum(dim=-1), lowest, highest)
        return from_sort_keys(torch.where(top_p < 1.0, nucleus, lowest))


def _scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """logits / temperature in float32; unscaled where the temperature is 0."""
    return logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]


def _search(
    keys: torch.Tensor,
    weights: torch.Tensor,
    limits: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
) -> torch.Tensor:
    """The lowest key in [low, high] with less than ``limits`` of weight above it, by bisection: [num_rows]

    keys, weights [num_rows, vocab_size]; the weight above ``high`` must be less.
    """
    for _ in range(32):
        middle = (low & high) + ((low ^ high) >> 1)
        few = torch.where(keys > middle[:, None], weights, 0.0).sum(dim=-1) < limits
        low = torch.where(few, low, middle + 1)
        high = torch.where(few, middle, high)
        low = torch.minimum(low, high)
    return high


def sort_keys(x: torch.Tensor) -> torch.Tensor:
    """float32 -> int32 with the same order."""
    bits = x.view(torch.int32)
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def from_sort_keys(keys: torch.Tensor) -> torch.Tensor:
    """The inverse of ``sort_keys``."""
    return torch.where(keys >= 0, keys, keys ^ 0x7FFFFFFF).view(torch.float32)


def random_bits(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """keys [num_rows, 2] int32, tokens [n] -> 32 random bits each, as int64 [num_rows, n]"""
    first, second = (keys.long() & 0xFFFFFFFF).unbind(dim=-1)
    mixed = _mix32(tokens[None] * GOLDEN_RATIO + first[:, None] & 0xFFFFFFFF)
    return _mix32(mixed ^ second[:, None])


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Hash 32 bits, held in int64."""
    x = (x ^ (x >> 16)) * FIRST_FACTOR & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * SECOND_FACTOR & 0xFFFFFFFF
    return x ^ (x >> 16)


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """32 random bits -> an exponentially distributed float32.

    -log(1 - u) rather than -log(u): the smallest value wins the draw, so small values must be exact.
    """
    u = (bits.float() * 2.0**-32 + 2.0**-33).clamp_(max=LARGEST_BELOW_ONE)
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))
    return torch.where(u < SERIES_LIMIT, series, -(1.0 - u).log())
