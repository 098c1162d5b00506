"""The device's KV pool in Mooncake's transfer engine. Imports Mooncake when an object is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.errors import ConfigError
from engine.kv_transfer.wire import Located
from engine.worker.kv_transfer.peer_memory import failed


class MooncakeMemory:
    """A PeerMemory over a transfer engine that finds others without a metadata server."""

    library = "mooncake"

    def __init__(self, device_pool: torch.Tensor, host: str, protocol: str) -> None:
        """``device_pool``: [num_blocks, ...], block-major. ``host``: the address at which others reach it.
        ``protocol``: ``tcp`` or ``rdma``."""
        self._pool = device_pool
        make_engine = _import_engine()
        try:
            self._engine: Any = make_engine()
            if self._engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
                raise OSError(f"it cannot be started with {protocol} at {host}")
            if self._engine.register_memory(device_pool.data_ptr(), device_pool.nbytes):
                raise OSError("it cannot register the memory")
            self._name = f"{host}:{self._engine.get_rpc_port()}"
        except Exception as error:
            raise failed("Mooncake", error) from error

    def locate(self, block_ids: Sequence[int]) -> Located:
        size = self._pool[0].nbytes
        device = self._pool.device.index or 0
        name = self._name.encode()
        return Located(name, self._pool.device.type, device, self._pool.data_ptr(), size, list(block_ids))

    def read(self, there: Located, block_ids: Sequence[int]) -> None:
        size, own = there.block_bytes, self._pool.data_ptr()
        ended = self._engine.batch_transfer_sync_read(
            there.agent.decode(),
            [own + block_id * size for block_id in block_ids],
            [there.address + block_id * size for block_id in there.block_ids],
            [size] * len(block_ids),
        )
        if ended:
            raise ConnectionError("Mooncake: the blocks did not arrive")


def _import_engine() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise ConfigError(
            f"kv_transfer_config: MooncakeConnector needs continuum-engine[mooncake], for GPUs Mooncake's "
            f"build for them, and libibverbs: {error}."
        ) from error
    return TransferEngine
