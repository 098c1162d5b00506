"""The first of several ranks samples, on the device, and broadcasts its tokens."""

from __future__ import annotations

from threading import Barrier, Thread

import torch

from engine.worker.gpu.device_rank_sampler import DeviceRankSampler, select_device_sampler
from engine.worker.gpu.device_sampler import DeviceSampler, DeviceSampling
from engine.worker.gpu.streams import HostStreams
from engine.worker.gpu.torch_sampling import TorchSamplingOps
from engine.worker.parallel.expert_peers import NO_PEERS
from engine.worker.parallel.group import ALONE, TensorParallelGroup
from engine.worker.parallel.pipeline import WHOLE_MODEL
from tests.worker.sampling import VOCAB_SIZE, random_logits


class ClientHint:
    """One of two ranks in threads of one process; only tokens are exchanged."""

    size = local_size = 2
    stage = WHOLE_MODEL
    peers = NO_PEERS

    def __init__(self, rank: int, board: dict[str, torch.Tensor], met: Barrier) -> None:
        self.rank = self.local_rank = rank
        self._board = board
        self._met = met

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            self._board["tokens"] = x
        self._met.wait(60)
        received = x.copy_(self._board["tokens"])
        self._met.wait(60)  # before the first rank broadcasts again
        return received

    def smallest(self, number: int) -> int:
        raise NotImplementedError


def sampler(group: TensorParallelGroup) -> DeviceSampler:
    return select_device_sampler(0, VOCAB_SIZE, TorchSamplingOps(), HostStreams(), group)


def test_all_ranks_learn_what_the_first_chose() -> None:
    """The other ranks have logits of no tokens."""
    logits = torch.stack([random_logits(seed) for seed in range(3)])
    history = torch.zeros((3, 4), dtype=torch.int32)
    board: dict[str, torch.Tensor] = {}
    met, learnt = Barrier(2), {}

    def run(rank: int) -> None:
        seen = logits if rank == 0 else logits[:, :0]
        told = sampler(ClientHint(rank, board, met)).sample(seen, DeviceSampling(), history)
        learnt[rank] = told.token_ids.tolist()

    threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert learnt[0] == learnt[1] == logits.argmax(dim=-1).tolist()


def test_a_rank_alone_tells_nobody() -> None:
    """A single rank samples like one device."""
    assert not isinstance(sampler(ALONE), DeviceRankSampler)
