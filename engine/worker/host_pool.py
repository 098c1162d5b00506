"""Host memory for copies of KV blocks. Copies what the plan says; does not know which block is whose."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.config import CacheConfig
from engine.errors import ModelLoadError
from engine.outputs import BlockCopies, KVLoad
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.memory import as_gib, available_bytes

HOST = torch.device("cpu")


class HostPool:
    """Slots shaped like the device's blocks. Each copy is done when the call returns, so a plan's loads are
    finished with its step, and neither side can change under a copy."""

    def __init__(self, device_pool: torch.Tensor, num_slots: int) -> None:
        """``device_pool``: [num_blocks, ...], block-major."""
        self._device = device_pool
        self._host = torch.zeros((num_slots, *device_pool.shape[1:]), dtype=device_pool.dtype, device=HOST)

    def store(self, copies: BlockCopies) -> None:
        """Device to host."""
        if len(copies):
            blocks = torch.tensor(copies.block_ids, device=self._device.device)
            self._host[torch.tensor(copies.host_slots)] = self._device[blocks].to(HOST)

    def load(self, loads: Sequence[KVLoad]) -> list[int]:
        """Host to device; the ids of the loads that are finished, which is all."""
        for load in loads:
            blocks = torch.tensor(load.copies.block_ids, device=self._device.device)
            self._device[blocks] = self._host[torch.tensor(load.copies.host_slots)].to(self._device.device)
        return [load.load_id for load in loads]


def choose_num_host_blocks(
    cache: CacheConfig, spec: KvCacheSpec, device: torch.device, num_device_blocks: int
) -> int:
    """Slots of the host pool, 0 if there is to be none. ModelLoadError if the host has not the memory, of
    which the device's pool takes its part if the device is the host."""
    num_slots = cache.num_host_blocks(spec.bytes_per_block)
    needed = num_slots * spec.bytes_per_block
    taken = num_device_blocks * spec.bytes_per_block if device.type == "cpu" else 0
    available = max(0, available_bytes(HOST) - taken)
    if needed > available:
        raise ModelLoadError(
            f"The host tier of {num_slots} KV blocks needs {as_gib(needed)} of host memory, "
            f"but only {as_gib(available)} are available."
        )
    return num_slots
