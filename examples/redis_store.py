"""Keeps the KV of prompts in Redis: all servers of a model find what one of them has computed.

pip install redis
cd examples
continuum serve MODEL_FOLDER --kv-transfer-config '{"kv_connector": "RedisStore",
    "kv_connector_module_path": "redis_store", "kv_connector_extra_config": {"url": "redis://localhost"}}'
"""

from collections.abc import Sequence

import redis

from engine.kv_transfer.kv_store import StoreConfig


class RedisStore:
    """A ``KVStore``. Redis evicts by its own ``maxmemory-policy``; ``expire_s``: seconds without a write."""

    def __init__(self, config: StoreConfig) -> None:
        config.check_names("url", "expire_s")
        self._redis = redis.Redis.from_url(config.text("url"), socket_timeout=5)
        self._redis.ping()  # an error here ends the start, with a sentence
        self._expire_s = config.number("expire_s", 86400)
        self._block_bytes = config.block_bytes

    def num_held(self, keys: Sequence[str]) -> int:
        questions = self._redis.pipeline(transaction=False)
        for key in keys:
            questions.exists(key)
        held = questions.execute()
        return next((index for index, is_held in enumerate(held) if not is_held), len(held))

    def read(self, keys: Sequence[str], into: memoryview) -> None:
        for index, block in enumerate(self._redis.mget(list(keys))):
            if not isinstance(block, bytes) or len(block) != self._block_bytes:
                raise OSError("a block is no longer in Redis")
            into[index * self._block_bytes : (index + 1) * self._block_bytes] = block

    def write(self, keys: Sequence[str], content: memoryview) -> None:
        blocks = self._redis.pipeline(transaction=False)
        for index, key in enumerate(keys):
            start = index * self._block_bytes
            blocks.set(key, bytes(content[start : start + self._block_bytes]), ex=self._expire_s)
        blocks.execute()

    def delete(self, keys: Sequence[str]) -> None:
        if keys:
            self._redis.delete(*keys)

    def close(self) -> None:
        self._redis.close()
