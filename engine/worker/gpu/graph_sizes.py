"""The steps for which CUDA graphs are captured. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_FINE = 8
_FINE_LIMIT = 256
_COARSE = 64
_COARSE_LIMIT = 1024
MOST_VERIFIED_TOKENS = 1024
"""Tokens of the largest captured step with drafts. A larger step computes for longer than its launches take,
and a graph would keep the logits of all its tokens."""


class GraphShape(NamedTuple):
    """The shape of a step of equal sequences that a graph computes."""

    num_seqs: int
    uniform_len: int
    """Query tokens of each sequence."""

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.uniform_len


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes of graphs for decodes, of one token per sequence, and for steps that verify drafts."""

    sizes: tuple[int, ...]
    """Numbers of sequences, ascending; empty: nothing is captured."""
    verified_len: int = 1
    """Query tokens of each sequence in a step with drafts: 1 plus the most drafts. 1: there is no drafter."""
    max_tokens: int | None = None
    """The most tokens of a step that verifies drafts, padding included; None: no limit."""

    @classmethod
    def up_to(cls, max_num_seqs: int, verified_len: int = 1, max_tokens: int | None = None) -> GraphSizes:
        """Sizes 1, 2, 4, then in steps that trade padding against captures; the last is ``max_num_seqs``."""
        limit = min(max_num_seqs, _COARSE_LIMIT)
        wanted = [1, 2, 4, *range(_FINE, _FINE_LIMIT, _FINE), *range(_FINE_LIMIT, _COARSE_LIMIT, _COARSE)]
        return cls((*(size for size in wanted if size < limit), limit), verified_len, max_tokens)

    @property
    def largest(self) -> int:
        return self.sizes[-1] if self.sizes else 0

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest graph."""
        return max((shape.num_tokens for shape in self.shapes()), default=0)

    def shapes(self) -> Iterator[GraphShape]:
        """All graphs, each kind in ascending order; without drafts, only those of decodes."""
        for size in self.sizes:
            yield GraphShape(size, 1)
        for size in self._verified_sizes():
            yield GraphShape(size, self.verified_len)

    def smallest(self, num_seqs: int, uniform_len: int = 1) -> GraphShape | None:
        """The smallest graph for ``num_seqs`` sequences of ``uniform_len`` tokens; None if there is none."""
        if uniform_len not in (1, self.verified_len):
            return None
        sizes = self.sizes if uniform_len == 1 else self._verified_sizes()
        place = bisect_left(sizes, num_seqs)
        return GraphShape(sizes[place], uniform_len) if place < len(sizes) else None

    def _verified_sizes(self) -> tuple[int, ...]:
        if self.verified_len == 1:
            return ()
        most = self.largest if self.max_tokens is None else self.max_tokens // self.verified_len
        return tuple(size for size in self.sizes if size <= most)
