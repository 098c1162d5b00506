"""A reader of KV events: it tracks what is cached, and checks each hash against its tokens."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

import msgspec

from engine.core.kv_cache.block_hash import ROOT_HASH
from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.records.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    PinChanged,
    PinEnded,
    PinEvent,
    PinPlaced,
    event_hash,
)

Content = tuple[str, int, int]
"""Medium, group and hash."""


class EventReader:
    """Applies events in order; fails on one that cannot follow the previous ones."""

    def __init__(self, *, parents_first: bool = True) -> None:
        """``parents_first``: no block precedes its parent. It may if no layer has full attention: after the
        end of a chunk a request needs nothing from before."""
        self.contents: set[Content] = set()
        self._parents_first = parents_first
        self._full: dict[int, bytes] = {}
        """The full hash of every block ever stored, computed from its tokens."""

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                assert event.medium is not None
                assert event.group_idx is not None
                self._remove({(event.medium, event.group_idx, h) for h in event.block_hashes})
            else:
                assert isinstance(event, AllBlocksCleared)
                self.contents.clear()

    def _store(self, event: BlockStored) -> None:
        assert event.medium is not None
        assert event.group_idx is not None
        assert event.extra_keys is not None
        size, count = event.block_size, len(event.block_hashes)
        assert len(event.token_ids) == count * size > 0
        assert len(event.extra_keys) == count
        if event.parent_block_hash is None:
            parent = ROOT_HASH
        elif event.parent_block_hash in self._full or self._parents_first:
            parent = self._full[event.parent_block_hash]
        else:
            self.contents |= {(event.medium, event.group_idx, h) for h in event.block_hashes}
            return
        for i, (block_hash, keys) in enumerate(zip(event.block_hashes, event.extra_keys, strict=True)):
            tokens = event.token_ids[i * size : (i + 1) * size]
            named = b"" if keys is None else msgspec.msgpack.encode(_as_hashed(keys, event.lora_name))
            parent = sha256(parent + struct.pack(f"={size}I", *tokens) + named).digest()
            assert event_hash(parent) == block_hash, "a hash is not that of its tokens"
            self._full[block_hash] = parent
            content = (event.medium, event.group_idx, block_hash)
            assert content not in self.contents, "stored twice"
            self.contents.add(content)

    def _remove(self, contents: set[Content]) -> None:
        assert contents <= self.contents, "removed, but never stored"
        self.contents -= contents


def _as_hashed(keys: Sequence[object], adapter: str | None) -> list[object]:
    """The extra keys of a block as its hash includes them: named, and in another order."""
    adapters = [] if adapter is None else [("adapter", keys[0])]
    others = keys[len(adapters) :]
    salts = [("salt", key) for key in others if isinstance(key, str)]
    return [*salts, *adapters, *(("media", *key) for key in others if isinstance(key, tuple | list))]


def contents_of(kv: KVCacheManager, host: Mapping[bytes, int]) -> set[Content]:
    """What is cached now, according to the pools and host memory."""
    found = {_content("GPU", b.block_hash, 0) for b in kv.pool.blocks if b.block_hash is not None}
    if kv.states is not None:
        last = len(kv.kv_cache_groups) - 1
        found |= {_content("GPU", s.block_hash, last) for s in kv.states.pool.blocks if s.block_hash}
    return found | {_content("CPU", name, 0) for name in host if len(name) <= 34}


def _content(medium: str, name: bytes, group: int) -> Content:
    return (medium, int.from_bytes(name[32:], "big") if len(name) > 32 else group, event_hash(name[:32]))


class PinReader:
    """The pins that are held, according to the events."""

    def __init__(self) -> None:
        self.pins: dict[int, tuple[int, int, float | None]] = {}
        """Tokens, blocks and deadline of each pin."""
        self.reasons: list[str] = []
        """Why pins ended, in order."""

    def apply(self, events: Iterable[PinEvent]) -> None:
        for event in events:
            if isinstance(event, PinEnded):
                del self.pins[event.pin_id]
                self.reasons.append(event.reason)
                continue
            assert isinstance(event, PinPlaced | PinChanged)
            assert isinstance(event, PinPlaced) == (event.pin_id not in self.pins)
            self.pins[event.pin_id] = event.num_tokens, event.num_blocks, event.held_until
