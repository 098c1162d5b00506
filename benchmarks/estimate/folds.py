"""Splits jobs into those to learn from and those to predict; jobs of one group stay together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from eval.errors import WorkloadError
from eval.learn.calls import Played


@dataclass(frozen=True, slots=True)
class Fold:
    """One part of a cross-validation."""

    learned: tuple[Played, ...]
    held_out: tuple[Played, ...]


def grouped_folds(jobs: Sequence[Played], num_folds: int, seed: int) -> list[Fold]:
    """Folds that hold out each job once. WorkloadError if there is only one group."""
    groups = sorted({job.group for job in jobs})
    if len(groups) < 2:
        raise WorkloadError(
            f"All jobs are of one group ({groups[0]}), but a second one is needed to predict the first."
        )
    random.Random(f"folds {seed}").shuffle(groups)
    number = {group: place % num_folds for place, group in enumerate(groups)}
    return [
        Fold(
            tuple(job for job in jobs if number[job.group] != fold),
            tuple(job for job in jobs if number[job.group] == fold),
        )
        for fold in range(min(num_folds, len(groups)))
    ]
