"""Checks the sampler's kernels: tokens are drawn by the softmax, and filters keep what they should."""

from __future__ import annotations

import math

import torch

from benchmarks.gpu.measures.bench import Bench
from engine.worker.gpu.sampling_ops import SamplingOps, select_sampling_ops

_ROWS = 256
"""Rows drawn at a time."""
_EXPECTED_PER_BIN = 50.0
_DEVIATIONS = 6.0
"""Largest deviation of a chi-squared statistic from its mean, in standard deviations: chance
exceeds it about once in 10^8 runs."""
_FILTER_LIMIT = 1e-4
"""Largest probability that may be kept or dropped wrongly: a token at the border may fall on either side."""


def check(bench: Bench) -> None:
    ops = select_sampling_ops(bench.device.where)
    with bench.case("draws by softmax"):
        _check_distribution(bench, ops)
    with bench.case("greedy among draws"):
        _check_greedy(bench, ops)
    with bench.case("top-k, top-p and min-p"):
        _check_filters(bench, ops)


def _logits(bench: Bench, num_rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(bench.device.where).manual_seed(seed)
    shape = (num_rows, bench.sizes.large.vocab_size)
    return 3 * torch.randn(shape, generator=generator, device=bench.device.where)


def _keys(bench: Bench, num_rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(bench.device.where).manual_seed(seed)
    return torch.randint(
        -(2**31), 2**31, (num_rows, 2), generator=generator, device=bench.device.where, dtype=torch.int32
    )


def _full(bench: Bench, num_rows: int, value: float) -> torch.Tensor:
    return torch.full((num_rows,), value, device=bench.device.where)


def _check_distribution(bench: Bench, ops: SamplingOps) -> None:
    """Checks many draws from one distribution, by chi-squared over bins of tokens."""
    temperature = 0.8
    rows = min(_ROWS, bench.sizes.num_draws)
    logits = _logits(bench, 1, seed=1)
    probabilities = (logits[0].double() / temperature).softmax(dim=-1)
    same = logits.repeat(rows, 1)
    floors = _full(bench, rows, float("-inf"))
    tokens = torch.cat(
        [
            ops.draw(same, _full(bench, rows, temperature), floors, _keys(bench, rows, seed))[0]
            for seed in range(bench.sizes.num_draws // rows)
        ]
    )
    counts = torch.bincount(tokens, minlength=logits.shape[1]).double()
    deviation = _chi_squared_deviation(counts, probabilities * len(tokens))
    bench.check("draws by softmax, in standard deviations of chi-squared", deviation, _DEVIATIONS)


def _chi_squared_deviation(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Both are [vocab_size]. Bins tokens by falling probability; each bin is expected to hold enough."""
    order = expected.argsort(descending=True)
    bins = (expected[order].cumsum(0) / _EXPECTED_PER_BIN).long()
    _, bins = torch.unique(bins, return_inverse=True)
    num_bins = int(bins.max()) + 1
    found, wanted = (
        torch.zeros_like(expected).index_add_(0, bins, each[order])[:num_bins] for each in (counts, expected)
    )
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    freedom = num_bins - 1
    return abs(statistic - freedom) / math.sqrt(2 * freedom)


def _check_greedy(bench: Bench, ops: SamplingOps) -> None:
    logits = _logits(bench, 8, seed=2).bfloat16()
    drawn, _ = ops.draw(logits, _full(bench, 8, 0.0), _full(bench, 8, float("-inf")), _keys(bench, 8, seed=2))
    best = logits.amax(dim=-1)
    chosen = logits.gather(1, drawn[:, None])[:, 0]
    bench.check("greedy among draws: rows whose token is not the best", float((chosen != best).sum()), 0.0)


def _check_filters(bench: Bench, ops: SamplingOps) -> None:
    """Compares the tokens that pass the floors with those that sorting keeps."""
    rows = 2 if bench.sizes.toy else 64
    logits = _logits(bench, rows, seed=3)
    where = bench.device.where
    steps = torch.arange(rows, device=where)
    temperature = 0.5 + steps / rows
    top_k = torch.where(steps % 3 == 0, logits.shape[1], 1 + 13 * steps).to(torch.int32)
    top_k = top_k.clamp(max=logits.shape[1])
    top_p = torch.where(steps % 4 == 0, 1.0, 0.5 + steps / (2 * rows))
    min_p = torch.where(steps % 2 == 0, 0.0, 0.02)
    scaled = logits / temperature[:, None]
    kept = scaled >= ops.floors(logits, temperature, top_k, top_p, min_p)[:, None]
    expected = _kept_by_sorting(scaled.double(), top_k, top_p, min_p)
    wrong = scaled.double().softmax(dim=-1).masked_fill(kept == expected, 0.0).sum(dim=-1)
    bench.check("filters: probability on the wrong side", float(wrong.max()), _FILTER_LIMIT)


def _kept_by_sorting(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Returns [num_rows, vocab_size]: applies min-p, then top-k, then top-p."""
    ordered, order = scaled.sort(dim=-1, descending=True)
    ranks = torch.arange(scaled.shape[1], device=scaled.device)
    kept = (ordered >= ordered[:, :1] + min_p.double().log()[:, None]) & (ranks < top_k[:, None])
    mass = (ordered - ordered[:, :1]).exp() * kept
    share = mass / mass.sum(dim=-1, keepdim=True)
    kept &= (share.cumsum(dim=-1) - share < top_p[:, None].double()) | (top_p[:, None] >= 1.0)
    return torch.zeros_like(kept).scatter(1, order, kept)
