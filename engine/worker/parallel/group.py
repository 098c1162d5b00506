"""What one of the processes that compute a model together asks of the others. Knows no transport."""

from __future__ import annotations

from typing import Protocol

import torch


class TensorParallelGroup(Protocol):
    """The ranks of a model, as one of them sees it. All of them make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Which one this is; 0 is the first, which samples."""

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, for all of them; x, contiguous, is overwritten with it."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, width] -> side by side [n, size * width] at the first rank, nothing [n, 0] at the others"""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The first rank's x, for all of them; x is overwritten with it."""

    def smallest(self, number: int) -> int:
        """The smallest of every rank's number."""


class SingleRank:
    """A group of one process: there is nobody to ask."""

    rank, size = 0, 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def smallest(self, number: int) -> int:
        return number


ALONE: TensorParallelGroup = SingleRank()


def sharers(group: TensorParallelGroup, device: torch.device) -> int:
    """How many ranks take their memory and their cores from ``device``."""
    return group.size if device.type == "cpu" else 1
