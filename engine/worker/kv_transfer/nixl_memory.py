"""The device's KV pool in NIXL: registers it, describes it for readers, and reads into it. Imports NIXL when
an object is made."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Sequence
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np
import torch

from engine.errors import ConfigError
from engine.kv_transfer.wire import Located
from engine.worker.kv_transfer.peer_memory import failed

logger = logging.getLogger(__name__)

MODULES = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")
"""Modules of NIXL's Python API, depending on how it was installed."""
POLL_S = 0.0002
READ_TIMEOUT_S = 10.0


class NixlMemory:
    """A PeerMemory: a NIXL agent over UCX."""

    library = "nixl"

    def __init__(self, device_pool: torch.Tensor) -> None:
        """``device_pool``: [num_blocks, ...], block-major. ConfigError without NIXL, or if it fails."""
        api = _import_nixl()
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self._pool = device_pool
        self._memory = "VRAM" if device_pool.device.type == "cuda" else "DRAM"
        self._device = device_pool.device.index or 0
        self._remote: dict[bytes, str] = {}
        """Names of agents by their metadata."""
        self._lock = Lock()
        try:
            config = api.nixl_agent_config(backends=["UCX"], sync_mode=strict)
            self._agent = api.nixl_agent(f"kv-{uuid.uuid4()}", config)
            self._agent.register_memory(device_pool)
            self._metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise failed("NIXL", error) from error

    def locate(self, block_ids: Sequence[int]) -> Located:
        address = self._pool.data_ptr()
        size = self._pool[0].nbytes
        return Located(self._metadata, self._memory, self._device, address, size, list(block_ids))

    def read(self, there: Located, block_ids: Sequence[int]) -> None:
        agent = self._agent
        name = self._name_of(there.agent)
        own = _descriptors(self._pool.data_ptr(), there.block_bytes, self._device, block_ids)
        theirs = _descriptors(there.address, there.block_bytes, there.device, there.block_ids)
        try:
            transfer = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(own, self._memory),
                agent.get_xfer_descs(theirs, there.memory),
                name,
            )
            state = agent.transfer(transfer)
            deadline = time.monotonic() + READ_TIMEOUT_S
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(POLL_S)
                state = agent.check_xfer_state(transfer)
            self._release(transfer)
        except Exception as error:
            self._forget(there.agent)
            raise ConnectionError(f"NIXL: {error!r}") from error
        if state != "DONE":
            self._forget(there.agent)
            raise ConnectionError("NIXL: the blocks did not arrive")

    def _release(self, transfer: Any) -> None:
        """Release a transfer, canceling it if it still runs; wait for one that cannot be canceled."""
        while True:
            try:
                self._agent.release_xfer_handle(transfer)
                return
            except Exception:
                if self._agent.check_xfer_state(transfer) != "PROC":
                    raise
                time.sleep(POLL_S)

    def _name_of(self, metadata: bytes) -> str:
        with self._lock:
            name = self._remote.get(metadata)
            if name is None:
                try:
                    name = self._remote[metadata] = self._agent.add_remote_agent(metadata)
                except Exception as error:
                    raise ConnectionError(f"NIXL does not know the other agent: {error!r}") from error
            return name

    def _forget(self, metadata: bytes) -> None:
        """Drop an agent that failed: another process may have taken its place."""
        with self._lock:
            name = self._remote.pop(metadata, None)
            if name is not None:
                try:
                    self._agent.remove_remote_agent(name)
                except Exception as error:
                    logger.debug("NIXL did not drop an agent: %r", error)


def _descriptors(address: int, block_bytes: int, device: int, block_ids: Sequence[int]) -> Any:
    """[num_blocks, 3]: address, bytes and device of each block."""
    rows = np.empty((len(block_ids), 3), dtype=np.uint64)
    rows[:, 0] = np.asarray(block_ids, dtype=np.uint64) * np.uint64(block_bytes) + np.uint64(address)
    rows[:, 1], rows[:, 2] = block_bytes, device
    return rows


def _import_nixl() -> Any:
    for name in MODULES:
        try:
            api = import_module(name)
        except ImportError:
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)  # it logs agents at level INFO
        return api
    raise ConfigError(
        "kv_transfer_config: NixlConnector needs NIXL: install continuum-engine[nixl], for GPUs the build "
        "of NIXL for their CUDA."
    )
