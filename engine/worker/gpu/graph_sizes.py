"""The batch sizes for which CUDA graphs are captured. Arithmetic alone."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

_FINE, _FINE_LIMIT = 8, 256
_COARSE, _COARSE_LIMIT = 64, 1024


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Graphs of steps in which every sequence has ``uniform_len`` query tokens."""

    sizes: tuple[int, ...]
    """Numbers of sequences, ascending; empty: nothing is captured."""
    uniform_len: int = 1
    """1: decode; N: decode that also verifies N - 1 draft tokens."""

    @classmethod
    def up_to(cls, max_num_seqs: int, uniform_len: int = 1) -> GraphSizes:
        """1, 2, 4, then in steps that trade padding against captures; ends with ``max_num_seqs``."""
        limit = min(max_num_seqs, _COARSE_LIMIT)
        wanted = [1, 2, 4, *range(_FINE, _FINE_LIMIT, _FINE), *range(_FINE_LIMIT, _COARSE_LIMIT, _COARSE)]
        return cls((*(size for size in wanted if size < limit), limit), uniform_len)

    @property
    def largest(self) -> int:
        return self.sizes[-1] if self.sizes else 0

    def smallest(self, num_seqs: int) -> int | None:
        """The smallest size of at least ``num_seqs`` sequences; None if there is none."""
        place = bisect_left(self.sizes, num_seqs)
        return self.sizes[place] if place < len(self.sizes) else None
