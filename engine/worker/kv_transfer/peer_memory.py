"""A KV pool whose blocks other servers read in place, and that reads theirs. Knows no library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.config.kv_transfer import KVTransferConfig
from engine.errors import ConfigError
from engine.kv_transfer.wire import Located


class PeerMemory(Protocol):
    """A device's KV pool in a library for such reads. Several threads may use it."""

    library: str
    """The library's name; both sides must use the same."""

    def locate(self, block_ids: Sequence[int]) -> Located:
        """Describes where these blocks are, for a reader."""

    def read(self, there: Located, block_ids: Sequence[int]) -> None:
        """Read blocks of another pool into these, and wait until they are written.

        Raises OSError if the read fails; after that nothing is written to the blocks any more.
        """


def open_memory(transfer: KVTransferConfig, device_pool: torch.Tensor) -> PeerMemory | None:
    """The pool ([num_blocks, ...], block-major) in the connector's library; None if it needs no library.

    ConfigError if the library is not installed, or cannot use the pool.
    """
    if transfer.kv_connector == "NixlConnector":
        from engine.worker.kv_transfer.nixl_memory import NixlMemory

        return NixlMemory(device_pool)
    return None


def failed(library: str, error: Exception) -> ConfigError:
    """The error of a library that cannot use the pool."""
    return ConfigError(f"kv_transfer_config: {library} cannot use the KV pool: {error!r}.")
