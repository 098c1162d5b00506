"""Ranks for tests: engines that end their ranks, rank processes of others, and a single rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from engine.worker.parallel.expert_peers import NO_PEERS, ExpertPeers
from engine.worker.parallel.pipeline import WHOLE_MODEL, PipelineStage
from tests.child_processes import children_of
from tests.worker.generation import SmallEngine


@contextmanager
def two_ranks(
    folder: Path,
    *,
    num_blocks: int = 64,
    max_num_batched_tokens: int = 256,
    device: str = "cpu",
    enable_expert_parallel: bool = False,
    num_state_slots: int | None = None,
) -> Iterator[SmallEngine]:
    """An engine with a model in two processes."""
    engine = SmallEngine(
        folder,
        num_blocks=num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        device=device,
        tensor_parallel_size=2,
        enable_expert_parallel=enable_expert_parallel,
        num_state_slots=num_state_slots,
    )
    try:
        yield engine
    finally:
        engine.executor.shutdown()


def rank_pids(parent: int) -> list[int]:
    """The rank processes among a process's children, in order."""
    return sorted(children_of(parent, "rank_proc"))


@dataclass(frozen=True)
class LoneRank:
    """One of several ranks, which needs nothing from the others, so that its part can be inspected."""

    rank: int
    size: int
    stage: ClassVar[PipelineStage] = WHOLE_MODEL
    peers: ClassVar[ExpertPeers] = NO_PEERS

    @property
    def local_rank(self) -> int:
        return self.rank

    @property
    def local_size(self) -> int:
        return self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def smallest(self, number: int) -> int:
        raise NotImplementedError
