"""KV in Mooncake's distributed store: memory that servers pool, found through one master.

Needs the package ``mooncake-transfer-engine`` (``-non-cuda`` on machines without CUDA) and a running
``mooncake_master``, which evicts what has not been used for longest.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import ConfigError
from engine.kv_transfer.kv_store import StoreConfig


class MooncakeStoreConnector:
    """A ``KVStore``. Options: ``master`` (host:port), ``metadata_server``, ``local_hostname``, ``protocol``,
    ``device_name``, ``global_segment_size`` (bytes of this rank's memory that the store may fill) and
    ``local_buffer_size`` (bytes through which it copies), as Mooncake's own configuration has them."""

    def __init__(self, config: StoreConfig) -> None:
        known = ("master", "metadata_server", "local_hostname", "protocol", "device_name")
        config.check_names(*known, "global_segment_size", "local_buffer_size")
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"kv_connector MooncakeStoreConnector needs the package mooncake-transfer-engine: {error}."
            ) from error
        master = config.text("master")
        segment = config.number("global_segment_size", 2**30) if config.role == "worker" else 0
        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            config.text("local_hostname", "localhost"),
            config.text("metadata_server", "P2PHANDSHAKE"),
            segment,
            config.number("local_buffer_size", 256 * 2**20),
            config.text("protocol", "tcp"),
            config.text("device_name", ""),
            master,
        )
        if code:
            raise ConfigError(f"kv_connector: Mooncake's master at {master} did not accept us (code {code}).")
        self._block_bytes = config.block_bytes

    def num_held(self, keys: Sequence[str]) -> int:
        found = self._store.batch_is_exist(list(keys))
        if any(code < 0 for code in found):
            raise OSError(f"Mooncake's master answered with code {min(found)}")
        return next((index for index, code in enumerate(found) if code != 1), len(found))

    def read(self, keys: Sequence[str], into: memoryview) -> None:
        size = self._block_bytes
        for index, block in enumerate(self._store.get_batch(list(keys))):
            if len(block) != size:
                raise OSError("a block is no longer in Mooncake's store")
            into[index * size : (index + 1) * size] = block

    def write(self, keys: Sequence[str], content: memoryview) -> None:
        size = self._block_bytes
        blocks = [content[index * size : (index + 1) * size] for index in range(len(keys))]
        code = self._store.put_batch(list(keys), blocks)
        if code:
            raise OSError(f"Mooncake's store took no block: code {code}")

    def delete(self, keys: Sequence[str]) -> None:
        self._store.batch_remove(list(keys))

    def close(self) -> None:
        self._store.close()
