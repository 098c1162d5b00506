"""Ranks of several engine cores that share a model's experts. Knows no transport.

Each core computes attention for its own requests; in a mixture of experts every core's tokens go through
every core's experts. So all cores run their steps together; a core without tokens takes part, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class PeerLink(Protocol):
    """The ranks with the same number in all cores. All make the same calls in the same order."""

    def exchange(self, number: int) -> list[int]:
        """Return the numbers of all cores to all of them."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, width], with the same n in all cores -> [num_cores, n, width]"""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every core's x to all of them; x, contiguous, is overwritten."""


class Bell(Protocol):
    """Notifies the other cores that this one has begun a wave of steps, and receives their notifications."""

    def ring(self, number: int) -> None:
        """Announce that this core has begun the wave with this number."""

    def listen(self, told: Callable[[int], None]) -> None:
        """Call ``told`` on a thread with the number of each wave, in order."""


class ExpertPeers:
    """The cores that share the experts, as seen by a rank of one of them."""

    def __init__(
        self, core: int = 0, num_cores: int = 1, link: PeerLink | None = None, bell: Bell | None = None
    ) -> None:
        """``core``: this core's number. ``link``: needed if there are several cores. ``bell``: only on the
        first rank of each core."""
        self.core = core
        self.num_cores = num_cores
        self.bell = bell
        self._link = link
        self._counts: Sequence[int] | None = None
        """Each core's number of tokens in this step; None outside of steps."""

    @property
    def link(self) -> PeerLink:
        assert self._link is not None, "the only core has no peers"
        return self._link

    def begin_step(self, num_tokens: int) -> bool:
        """Exchange numbers of tokens with all other cores, and wait for theirs. False if no core has any."""
        self._counts = self.link.exchange(num_tokens)
        return any(self._counts)

    def end_step(self) -> None:
        self._counts = None

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, width] -> [tokens of all cores, width], core by core

        Outside of steps, where memory and speed are measured, it assumes that all cores have such an x.
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
        """parts [tokens of all cores, width], the output of this core's experts -> [num_tokens, width], the
        output of all cores' experts for this core's tokens"""
        if self.num_cores == 1:
            return parts
        if self._counts is None:
            return parts[: len(parts) // self.num_cores]
        summed = self.link.all_reduce(parts.contiguous())
        first = sum(self._counts[: self.core])
        return summed[first : first + self._counts[self.core]]


NO_PEERS = ExpertPeers()
"""The peers of a core that has all experts."""
