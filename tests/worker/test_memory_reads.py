"""A library reads the blocks of a lease in place; what it read of an ended lease is not used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from engine.core.outputs import NewKVLease, RemoteReads
from engine.kv_transfer.wire import Located
from engine.records.kv_transfer import RemotePrefix
from engine.worker.kv_transfer.block_rows import BlockRows
from engine.worker.kv_transfer.lease_server import LeaseServer
from engine.worker.kv_transfer.memory_reader import MemoryReader
from engine.worker.kv_transfer.nixl_memory import NixlMemory
from engine.worker.kv_transfer.peer_memory import PeerMemory
from tests.worker.kv_transfer import NEEDS_NIXL
from tests.worker.test_kv_transfer import free_port

SHAPE = (12, 4, 64)
NAMES = [bytes([i]) * 32 for i in range(3)]
LEASE = NewKVLease("lease", dict(zip(NAMES, (7, 2, 5), strict=True)))


class Watched:
    """A PeerMemory that calls a function after each read."""

    def __init__(self, memory: PeerMemory, when_read: Callable[[], None]) -> None:
        self._memory = memory
        self.library = memory.library
        self._when_read = when_read

    def locate(self, block_ids: Sequence[int]) -> Located:
        return self._memory.locate(block_ids)

    def read(self, there: Located, block_ids: Sequence[int]) -> None:
        self._memory.read(there, block_ids)
        self._when_read()


@contextmanager
def server(pool: torch.Tensor, port: int, memory: PeerMemory | None) -> Iterator[LeaseServer]:
    leases = LeaseServer(pool, "127.0.0.1", port, "fits", memory)
    leases.begin([LEASE])
    try:
        yield leases
    finally:
        leases.close()


def reads(port: int) -> RemoteReads:
    return RemoteReads(RemotePrefix("lease", 48, "127.0.0.1", port), NAMES, [1, 9, 4])


MEMORIES = [
    pytest.param(NixlMemory, marks=NEEDS_NIXL),
]


@pytest.mark.parametrize("memory_of", MEMORIES)
def test_blocks_come_and_a_lease_that_ended_meanwhile_is_told(
    memory_of: Callable[[torch.Tensor], PeerMemory],
) -> None:
    theirs, ours = torch.randn(SHAPE), torch.zeros(SHAPE)
    port, memory = free_port(), memory_of(ours)
    with server(theirs, port, memory_of(theirs)) as leases:
        MemoryReader(0, "fits", memory).fetch(reads(port), BlockRows(ours), ())
        assert torch.equal(ours[[1, 9, 4]], theirs[[7, 2, 5]])
        assert not ours[[0, 2, 3, 5, 6, 7, 8, 10, 11]].any()

        late = MemoryReader(0, "fits", Watched(memory, lambda: leases.end(["lease"])))
        with pytest.raises(ConnectionError, match="the lease has ended"):
            late.fetch(reads(port), BlockRows(ours), ())


@NEEDS_NIXL
def test_another_connector_is_told() -> None:
    theirs, ours = torch.randn(SHAPE), torch.zeros(SHAPE)
    port = free_port()
    with server(theirs, port, None), pytest.raises(ConnectionError, match="without nixl"):
        MemoryReader(0, "fits", NixlMemory(ours)).fetch(reads(port), BlockRows(ours), ())
