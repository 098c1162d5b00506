"""A random sample of bounded size of a stream, in which each item is equally likely; deterministic."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Sample(Generic[T]):
    """Reservoir sampling, algorithm R (Vitter 1985)."""

    def __init__(self, size: int) -> None:
        self.items: list[T] = []
        self.num_seen = 0
        self._size = size
        self._random = random.Random(size)

    def add(self, item: T) -> None:
        self.num_seen += 1
        if len(self.items) < self._size:
            self.items.append(item)
            return
        place = self._random.randrange(self.num_seen)
        if place < self._size:
            self.items[place] = item


def quantile(values: list[float], share: float) -> float | None:
    """Returns the least value that this share of them does not exceed; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


def evenly(items: Sequence[T], most: int) -> Sequence[T]:
    """Returns at most ``most`` of them, evenly spaced."""
    if len(items) <= most:
        return items
    return [items[index * len(items) // most] for index in range(most)]
