"""Synthetic calls with equal estimates, of which parallel calls take four times as long."""

from __future__ import annotations

import random

from estimator.learned.call_history import FEATURES, LEVELS, PastCall, log_of
from estimator.learned.duration_model import DurationModel
from estimator.learned.trees import LEAF, Trees

PARALLEL = FEATURES.index("calls in parallel")


def made_row(num_parallel: int) -> list[float]:
    """A row with quantiles of half a second to two, independent of parallel calls."""
    quantiles = [log_of(0.5 + 1.5 * level) for level in LEVELS]
    return [*quantiles, *[0.0] * (PARALLEL - len(LEVELS)), float(num_parallel), 8.0, 5.0]


def made_calls(num: int, *, effect: float = 4.0) -> list[PastCall]:
    rng = random.Random("made calls")
    calls = []
    for number in range(num):
        num_parallel = rng.choice((1, 3))
        seconds = rng.uniform(0.5, 2.0) * (effect if num_parallel > 1 else 1.0)
        row = tuple(made_row(num_parallel))
        calls.append(PastCall(f"job {number // 10}", ("bash", "web")[number % 2], row, log_of(seconds)))
    return calls


def constant_model(correction: float, *, loss: float = 0.1, loss_without: float = 0.2) -> DurationModel:
    """A model that adds the same to the logarithm of each quantile."""
    trees = Trees(0.0, [0], [LEAF], [0.0], [0], [0], [correction])
    return DurationModel(
        trees=[trees] * len(LEVELS), num_calls=500, loss=loss, loss_without=loss_without, kinds=[]
    )
