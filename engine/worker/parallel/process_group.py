"""A tensor-parallel group over torch.distributed: NCCL between GPUs, gloo between CPU processes.

All ranks are on one machine. Knows nothing of models.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


class ProcessGroup:
    """A TensorParallelGroup; the constructor returns when all ranks have joined."""

    def __init__(self, rank: int, size: int, device: torch.device, meeting_point: Path) -> None:
        """``meeting_point``: the path of the rendezvous file, which must not exist yet; the same for all
        ranks."""
        self.rank, self.size = rank, size
        self._device = device
        place = f"file://{meeting_point}"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", place, world_size=size, rank=rank, device_id=device)
        else:
            # By default gloo listens on the address that the host name resolves to, if there is one.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
            dist.init_process_group("gloo", place, world_size=size, rank=rank)

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
