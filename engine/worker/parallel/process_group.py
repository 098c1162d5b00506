"""A tensor-parallel group over torch.distributed: NCCL between GPUs, gloo between CPU processes.

Knows nothing of models, nor who started the ranks.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from engine.process.network import interface_of
from engine.worker.parallel.pipeline import PipelineStage
from engine.worker.ranks.rank_messages import RankPlace


class ProcessGroup:
    """A TensorParallelGroup; the constructor returns when all ranks have joined."""

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        self.rank, self.size = place.rank % place.num_in_stage, place.num_in_stage
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self._device = device
        self._first = place.rank - self.rank
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group(
                "nccl", place.meeting_point, world_size=place.size, rank=place.rank, device_id=device
            )
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface(place))
            dist.init_process_group("gloo", place.meeting_point, world_size=place.size, rank=place.rank)
        self._peers = _stage_peers(place)
        self.stage = PipelineStage(place.stage, place.num_stages, _Link(place))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(x, group=self._peers)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, width = x.shape
        if not num_rows or self.size == 1:
            return x
        if self.rank:
            dist.gather(x, dst=self._first, group=self._peers)
            return x.new_empty((num_rows, 0))
        parts = x.new_empty((self.size, num_rows, width))
        dist.gather(x, list(parts.unbind()), dst=self._first, group=self._peers)
        return parts.transpose(0, 1).reshape(num_rows, self.size * width)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            dist.broadcast(x, src=self._first, group=self._peers)
        return x

    def smallest(self, number: int) -> int:
        smallest = torch.tensor(number, device=self._device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)


def _stage_peers(place: RankPlace) -> dist.ProcessGroup | None:
    """The process group of the rank's stage; None: that of all ranks. All make those of all stages."""
    if place.num_stages == 1:
        return None
    size = place.num_in_stage
    firsts = range(0, place.size, size)
    groups = [dist.new_group(list(range(first, first + size))) for first in firsts]
    own: dist.ProcessGroup = groups[place.rank // size]
    return own


class _Link:
    """A StageLink to the rank of the same number in the stages before and behind."""

    def __init__(self, place: RankPlace) -> None:
        self._before, self._behind = place.rank + place.num_in_stage, place.rank - place.num_in_stage
        self._sending: tuple[dist.Work, torch.Tensor] | None = None
        """The last tensor, kept until it is sent."""

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        dist.recv(x, self._before)
        return x

    def send(self, x: torch.Tensor) -> None:
        if self._sending is not None:
            self._sending[0].wait()
        work = dist.isend(x, self._behind)
        assert work is not None, "this rank is among those of the group"
        self._sending = work, x


def _interface(place: RankPlace) -> str:
    """The network interface to listen at: by default gloo takes the address that the host name resolves to,
    if there is one."""
    own = None if place.address is None else interface_of(place.address)
    return own or ("lo0" if sys.platform == "darwin" else "lo")
