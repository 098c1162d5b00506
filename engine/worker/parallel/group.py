"""The collective operations between the ranks of a model. Knows no transport."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.worker.parallel.expert_peers import NO_PEERS, ExpertPeers
from engine.worker.parallel.pipeline import WHOLE_MODEL, PipelineStage


class TensorParallelGroup(Protocol):
    """The tensor-parallel group, as seen by one rank. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank's number; rank 0 is in the last stage of the pipeline and samples."""

    @property
    def size(self) -> int: ...

    @property
    def stage(self) -> PipelineStage:
        """The group's stage of the pipeline."""

    @property
    def peers(self) -> ExpertPeers:
        """The other engine cores with which it shares experts."""

    @property
    def local_rank(self) -> int:
        """Its number among the ranks on its machine, which is that of its device."""

    @property
    def local_size(self) -> int:
        """The number of ranks on its machine."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's x to all ranks; x, contiguous, is overwritten."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, width] -> concatenated [n, size * width] at the first rank, empty [n, 0] at the others"""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first rank's x to all ranks; x is overwritten."""

    def smallest(self, number: int) -> int:
        """Return the smallest of all ranks' numbers, over all stages of this engine core."""


class SingleRank:
    """A group of one process: every operation returns its input."""

    rank, size = local_rank, local_size = 0, 1
    stage = WHOLE_MODEL
    peers = NO_PEERS

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
    """The number of ranks that share the memory and the cores of ``device``."""
    return group.local_size if device.type == "cpu" else 1
