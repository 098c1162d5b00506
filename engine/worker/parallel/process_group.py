"""The ranks of a model over torch.distributed: NCCL between GPUs, gloo between CPU processes.

Knows nothing of models, nor of what started the ranks.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.errors import EngineDeadError
from engine.process.network import interface_of
from engine.worker.parallel.expert_peers import NO_PEERS, ExpertPeers
from engine.worker.parallel.pipeline import PipelineStage
from engine.worker.ranks.rank_messages import RankPlace

WAIT = timedelta(days=1000)
"""Practically no limit: torch logs to stderr when a wait times out."""
NUM_KEPT = 1000
"""The number of last waves that the store keeps, in case a core looks for one late."""


class ProcessGroup:
    """A TensorParallelGroup; the constructor returns after all ranks have joined."""

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        self.rank = place.rank % place.num_in_stage
        self.size = place.num_in_stage
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self._device = device
        self._first = place.core * place.size + place.rank - self.rank
        world_size = place.num_cores * place.size
        world_rank = place.core * place.size + place.rank
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface(place))
        where: dict[str, Any] = {"world_size": world_size, "rank": world_rank}
        if place.num_cores > 1:
            where["store"] = shared_store(place.meeting_point, is_first=world_rank == 0)
        else:
            where["init_method"] = place.meeting_point
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device, **where)
        else:
            dist.init_process_group("gloo", **where)
        self._in_stage = _stage_ranks(place)
        self.stage = PipelineStage(place.stage, place.num_stages, _Link(place))
        self.peers = _peers(place)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(x, group=self._in_stage)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, width = x.shape
        if not num_rows or self.size == 1:
            return x
        if self.rank:
            dist.gather(x, dst=self._first, group=self._in_stage)
            return x.new_empty((num_rows, 0))
        parts = x.new_empty((self.size, num_rows, width))
        dist.gather(x, list(parts.unbind()), dst=self._first, group=self._in_stage)
        return parts.transpose(0, 1).reshape(num_rows, self.size * width)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            dist.broadcast(x, src=self._first, group=self._in_stage)
        return x

    def smallest(self, number: int) -> int:
        if self.size * self.stage.size == 1:
            return number
        smallest = torch.tensor(number, device=self._device)
        # Cores that share experts have one stage each.
        among = self._in_stage if self.peers.num_cores > 1 else None
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=among)
        return int(smallest)


def _stage_ranks(place: RankPlace) -> dist.ProcessGroup | None:
    """The process group of the rank's stage; None: that of all ranks. All ranks create all stages' groups."""
    if place.num_stages == place.num_cores == 1:
        return None
    size = place.num_in_stage
    firsts = range(0, place.num_cores * place.size, size)
    return _own_group([list(range(first, first + size)) for first in firsts], place)


def _peers(place: RankPlace) -> ExpertPeers:
    """The ranks with the same number in all cores that share experts."""
    if place.num_cores == 1:
        return NO_PEERS
    starts = range(place.size)
    members = [list(range(start, place.num_cores * place.size, place.size)) for start in starts]
    bell = WaveBell(place.meeting_point) if place.rank == 0 else None
    return ExpertPeers(place.core, place.num_cores, _PeerLink(place, members), bell)


def _own_group(members: list[list[int]], place: RankPlace, backend: str | None = None) -> dist.ProcessGroup:
    """Create a process group for each list of ranks, and return the one that contains this rank."""
    groups = [dist.new_group(ranks, backend=backend) for ranks in members]
    rank = place.core * place.size + place.rank
    own: dist.ProcessGroup = next(
        group for ranks, group in zip(members, groups, strict=True) if rank in ranks
    )
    return own


class _PeerLink:
    """A PeerLink. It exchanges numbers over gloo, so that no host waits for a device."""

    def __init__(self, place: RankPlace, members: list[list[int]]) -> None:
        self._group = _own_group(members, place)
        is_gloo = dist.get_backend() == "gloo"
        self._host_group = self._group if is_gloo else _own_group(members, place, "gloo")
        self._num_cores = place.num_cores

    def exchange(self, number: int) -> list[int]:
        numbers = torch.empty((self._num_cores, 1), dtype=torch.int64)
        with _while_all_live():
            dist.all_gather(list(numbers.unbind()), torch.tensor([number]), group=self._host_group)
        told: list[int] = numbers.flatten().tolist()
        return told

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.new_empty((self._num_cores, *x.shape))
        with _while_all_live():
            dist.all_gather(list(rows.unbind()), x, group=self._group)
        return rows

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        with _while_all_live():
            dist.all_reduce(x, group=self._group)
        return x


@contextmanager
def _while_all_live() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo raises no other errors
        raise EngineDeadError("An engine core with which this one shares experts has ended.") from error


class _Link:
    """A StageLink to the ranks with the same number in the previous and the next stage."""

    def __init__(self, place: RankPlace) -> None:
        self._before = place.rank + place.num_in_stage
        self._behind = place.rank - place.num_in_stage
        self._sending: tuple[dist.Work, torch.Tensor] | None = None
        """The last tensor, kept until it has been sent."""

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        dist.recv(x, self._before)
        return x

    def send(self, x: torch.Tensor) -> None:
        if self._sending is not None:
            self._sending[0].wait()
        work = dist.isend(x, self._behind)
        assert work is not None, "this rank is among those of the group"
        self._sending = work, x


class WaveBell:
    """A Bell in the store of the process group, which has a key for each wave."""

    def __init__(self, meeting_point: str) -> None:
        """``meeting_point``: see ``RankPlace``; its ranks must have met there over TCP."""
        self._meeting_point = meeting_point
        self._store = shared_store(meeting_point)

    def ring(self, number: int) -> None:
        with _while_all_live():
            self._store.set(_key(number), "")
            if number > NUM_KEPT:
                self._store.delete_key(_key(number - NUM_KEPT))

    def listen(self, told: Callable[[int], None]) -> None:
        threading.Thread(target=self._listen, args=(told,), name="waves", daemon=True).start()

    def _listen(self, told: Callable[[int], None]) -> None:
        store = shared_store(self._meeting_point)  # a separate one, as waiting blocks the one that rings
        number = 1
        with suppress(dist.DistError, RuntimeError):  # the first core has ended, and this one is about to
            while True:
                store.wait([_key(number)], WAIT)
                told(number)
                number += 1


def shared_store(meeting_point: str, *, is_first: bool = False) -> TCPStore:
    """A connection to the store of several cores, which the first core's first rank serves only at this
    address: torch would listen at all addresses of the machine, without authentication."""
    place = urlsplit(meeting_point)
    assert place.hostname is not None
    assert place.port is not None
    if not is_first:
        return TCPStore(place.hostname, place.port, None, False, use_libuv=False)
    listener = socket.create_server(
        (place.hostname, place.port),
        family=socket.AF_INET6 if ":" in place.hostname else socket.AF_INET,
    )
    return TCPStore(
        place.hostname,
        place.port,
        None,
        True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=False,
    )


def _key(number: int) -> str:
    return f"waves/{number}"


def _interface(place: RankPlace) -> str:
    """The network interface to listen at; by default gloo uses the address that the host name resolves to, if
    there is one."""
    own = None if place.address is None else interface_of(place.address)
    return own or ("lo0" if sys.platform == "darwin" else "lo")
