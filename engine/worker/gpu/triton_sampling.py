"""SamplingOps in Triton: a draw reads the logits once; the search for floors reads them from the cache."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (arguments of kernels have Triton's types)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.worker.gpu import torch_sampling

BLOCK = 4096
"""Tokens that a program reads at a time."""
DRAW_WARPS = 8
FLOORS_WARPS = 16
_GOLDEN_RATIO = tl.constexpr(torch_sampling.GOLDEN_RATIO)
_FIRST_FACTOR = tl.constexpr(torch_sampling.FIRST_FACTOR)
_SECOND_FACTOR = tl.constexpr(torch_sampling.SECOND_FACTOR)
_SERIES_LIMIT = tl.constexpr(torch_sampling.SERIES_LIMIT)
_LARGEST_BELOW_ONE = tl.constexpr(torch_sampling.LARGEST_BELOW_ONE)


class TritonSamplingOps:
    """See SamplingOps."""

    def draw(
        self, logits: torch.Tensor, temperature: torch.Tensor, floors: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, vocab_size = logits.shape
        block = _block(vocab_size)
        num_parts = triton.cdiv(vocab_size, block)
        scores = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
        tokens = torch.empty((num_rows, num_parts), dtype=torch.int64, device=logits.device)
        draw_kernel[(num_rows, num_parts)](
            logits,
            temperature,
            floors,
            keys,
            scores,
            tokens,
            logits.stride(0),
            vocab_size,
            BLOCK=block,
            num_warps=DRAW_WARPS,
        )
        best, part = scores.max(dim=-1, keepdim=True)
        return tokens.gather(1, part)[:, 0], best[:, 0]

    def floors(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
    ) -> torch.Tensor:
        found = torch.empty_like(temperature)
        floors_kernel[(len(logits),)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            found,
            logits.stride(0),
            logits.shape[1],
            BLOCK=_block(logits.shape[1]),
            num_warps=FLOORS_WARPS,
        )
        return found


def _block(vocab_size: int) -> int:
    return min(BLOCK, int(triton.next_power_of_2(vocab_size)))


@triton.jit
def _scaled(logits, offsets, temperature, vocab_size):
    """logits / temperature; -inf past the vocabulary."""
    x = tl.load(logits + offsets, mask=offsets < vocab_size, other=float("-inf")).to(tl.float32)
    # Rounded like torch's: a value that torch found to be the floor must not be below it here.
    return tl.div_rn(x, tl.where(temperature > 0.0, temperature, 1.0))


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * _FIRST_FACTOR
    x = (x ^ (x >> 15)) * _SECOND_FACTOR
    return x ^ (x >> 16)


@triton.jit
def _random_bits(first, second, tokens):
    return _mix32(_mix32(tokens.to(tl.uint32) * _GOLDEN_RATIO + first) ^ second)


@triton.jit
def _exponential(bits):
    """See torch_sampling.exponential."""
    u = tl.minimum(bits.to(tl.float32) * 2.0**-32 + 2.0**-33, _LARGEST_BELOW_ONE)
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))
    return tl.where(u < _SERIES_LIMIT, series, -tl.log(1.0 - u))


@triton.jit
def draw_kernel(logits, temperatures, floors, keys, scores, tokens, stride, vocab_size, BLOCK: tl.constexpr):
    """The best token of one part of one row, and its score."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    first = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    second = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    offsets = part * BLOCK + tl.arange(0, BLOCK)
    x = _scaled(logits + row.to(tl.int64) * stride, offsets, temperature, vocab_size)
    noise = -tl.log(_exponential(_random_bits(first, second, offsets)))
    noisy = tl.where(temperature > 0.0, x + noise, x)
    noisy = tl.where(x < tl.load(floors + row), float("-inf"), noisy)
    noisy = tl.where(x != x, float("inf"), noisy)  # NaN, which tl.max may ignore
    best, winner = tl.max(noisy, axis=0, return_indices=True, return_indices_tie_break_left=True)
    place = row * tl.num_programs(1) + part
    tl.store(scores + place, best)
    tl.store(tokens + place, (part * BLOCK + winner).to(tl.int64))


@triton.jit
def _sort_keys(x):
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _weight_above(logits, temperature, key, best, vocab_size, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """The number of tokens above ``key``, or their probability mass."""
    total = 0.0
    for start in range(0, vocab_size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = _scaled(logits, offsets, temperature, vocab_size)
        taken = (_sort_keys(x) > key) & (offsets < vocab_size)
        if COUNTED:
            total += tl.sum(taken.to(tl.float32), axis=0)
        else:
            total += tl.sum(tl.where(taken, tl.exp(x - best), 0.0), axis=0)
    return total


@triton.jit
def _search(
    logits, temperature, limit, low, high, best, vocab_size, COUNTED: tl.constexpr, BLOCK: tl.constexpr
):
    """The lowest key in [low, high] with less than ``limit`` of weight above it, by bisection."""
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        above = _weight_above(logits, temperature, middle, best, vocab_size, COUNTED, BLOCK)
        if above < limit:
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def floors_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, found, stride, vocab_size, BLOCK: tl.constexpr
):
    """The floor of one row."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    temperature = tl.load(temperatures + row)
    best = float("-inf")
    for start in range(0, vocab_size, BLOCK):
        x = _scaled(logits, start + tl.arange(0, BLOCK), temperature, vocab_size)
        best = tl.maximum(best, tl.max(x, axis=0))
    highest = _sort_keys(best)
    min_p = tl.load(min_ps + row)
    lowest = _sort_keys(tl.where(min_p > 0.0, best + tl.log(tl.maximum(min_p, 2.0**-126)), float("-inf")))
    top_k = tl.load(top_ks + row)
    if top_k < vocab_size:
        limit = top_k.to(tl.float32)
        lowest = _search(logits, temperature, limit, lowest, highest, best, vocab_size, True, BLOCK)
    top_p = tl.load(top_ps + row)
    if top_p < 1.0:
        mass = _weight_above(logits, temperature, lowest - 1, best, vocab_size, False, BLOCK)
        lowest = _search(logits, temperature, top_p * mass, lowest, highest, best, vocab_size, False, BLOCK)
    bits = tl.where(lowest >= 0, lowest, lowest ^ 0x7FFFFFFF)
    tl.store(found + row, bits.to(tl.float32, bitcast=True))
