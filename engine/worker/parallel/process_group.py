"""A tensor-parallel group over torch.distributed: NCCL between GPUs, gloo between CPU processes.

Knows nothing of models, nor who started the ranks.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from engine.process.network import interface_of
from engine.worker.ranks.rank_messages import RankPlace


class ProcessGroup:
    """A TensorParallelGroup; the constructor returns when all ranks have joined."""

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self._device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group(
                "nccl", place.meeting_point, world_size=self.size, rank=self.rank, device_id=device
            )
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface(place))
            dist.init_process_group("gloo", place.meeting_point, world_size=self.size, rank=self.rank)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, width = x.shape
        if not num_rows:
            return x
        if self.rank:
            dist.gather(x, dst=0)
            return x.new_empty((num_rows, 0))
        parts = x.new_empty((self.size, num_rows, width))
        dist.gather(x, list(parts.unbind()), dst=0)
        return parts.transpose(0, 1).reshape(num_rows, self.size * width)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x, src=0)
        return x

    def smallest(self, number: int) -> int:
        smallest = torch.tensor(number, device=self._device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)


def _interface(place: RankPlace) -> str:
    """The network interface to listen at: by default gloo takes the address that the host name resolves to,
    if there is one."""
    own = None if place.address is None else interface_of(place.address)
    return own or ("lo0" if sys.platform == "darwin" else "lo")
