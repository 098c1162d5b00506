"""Ranks of several engine cores that have a model's experts among them. Knows no transport.

Each core computes attention for its own requests; in a mixture of experts every core's tokens go through
every core's experts. So all cores run their steps together: one that has no tokens has a part nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class PeerLink(Protocol):
    """The ranks of the same number in each core. All make the same calls in the same order."""

    def exchange(self, number: int) -> list[int]:
        """Return every core's number to all of them."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, width], with the same n in all cores -> [num_cores, n, width]"""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every core's x to all of them; x, contiguous, is overwritten."""


class Bell(Protocol):
    """Tells the other cores that this one has begun a wave of steps, and hears of theirs."""

    def ring(self, number: int) -> None:
        """This core has begun the wave of this number."""

    def listen(self, told: Callable[[int], None]) -> None:
        """Call ``told`` on a thread with the number of each wave, in their order."""


class ExpertPeers:
    """The cores that have the experts among them, as seen by a rank of one."""

    def __init__(
        self, core: int = 0, num_cores: int = 1, link: PeerLink | None = None, bell: Bell | None = None
    ) -> None:
        """``core``: the number of the one that this is. ``link``: needed if there is more than one.
        ``bell``: the first rank of each core has one."""
        self.core, self.num_cores = core, num_cores
        self.bell = bell
        self._link = link
        self._counts: Sequence[int] | None = None
        """Each core's tokens in this step; None outside of steps."""

    @property
    def link(self) -> PeerLink:
        assert self._link is not None, "the only core has no peers"
        return self._link

    def begin_step(self, num_tokens: int) -> bool:
        """Tell the others how many tokens this core has, and learn how many they have. Waits for all of them;
        False if none has any."""
        self._counts = self.link.exchange(num_tokens)
        return any(self._counts)

    def end_step(self) -> None:
        self._counts = None

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, width] -> [tokens of all cores, width], each core's behind those of the one before

        Outside of steps, where memory and speed are measured, as if all cores had such an x.
        """
        if self.num_cores == 1:
            return x
        if self._counts is None:
            return x.repeat(self.num_cores, 1)
        padded = x.new_zeros((max(self._counts), x.shape[1]))
        padded[: len(x)] = x
        rows = self.link.all_gather(padded)
        return torch.cat([its[:count] for its, count in zip(rows, self._counts, strict=True)])

    def own_sum(self, parts: torch.Tensor) -> torch.Tensor:
        """parts [tokens of all cores, width], what the experts here make of them -> [num_tokens, width], what
        all cores' experts make of this core's tokens"""
        if self.num_cores == 1:
            return parts
        if self._counts is None:
            return parts[: len(parts) // self.num_cores]
        summed = self.link.all_reduce(parts.contiguous())
        first = sum(self._counts[: self.core])
        return summed[first : first + self._counts[self.core]]


NO_PEERS = ExpertPeers()
"""The peers of a core that has all experts."""
