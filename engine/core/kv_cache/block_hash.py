"""Chained hashes of full KV blocks: equal hash means equal tokens from the very start, in the same context.

hash(i) = SHA-256(hash(i-1) | tokens of block i | extra keys), as in V1. Extra keys keep apart prefixes whose
tokens are equal but whose KV is not: cache salt, adapter, media content.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, repeat
from operator import add

import msgspec

from engine.records.messages import MediaSpan

BlockHash = bytes

ROOT_HASH: BlockHash = sha256(b"root").digest()
"""The parent of each first block."""
_TOKEN_BYTES = 4
"""Bytes of a token id: 32 bits hold the ids of any vocabulary, and fewer bytes are hashed faster."""


@dataclass(frozen=True, slots=True)
class HashContext:
    """What the KV of a request depends on besides its tokens."""

    cache_salt: str | None = None
    adapter: str | None = None
    """Name and digest of the adapter."""
    media: Sequence[MediaSpan] = ()

    @property
    def is_of_every_block(self) -> bool:
        """Whether blocks after the first may have extra keys."""
        return bool(self.adapter or self.media)

    def extra_keys(self, first: int, end: int) -> bytes:
        """The encoded extra keys of the block of tokens ``[first, end)``; empty if it has none."""
        keys: list[object] = []
        if first == 0 and self.cache_salt:
            keys.append(("salt", self.cache_salt))
        if self.adapter:
            keys.append(("adapter", self.adapter))
        for span in self.media:
            if span.offset < end and span.offset + span.length > first:
                keys.append(("media", span.content_hash, span.offset - first))
        return msgspec.msgpack.encode(keys) if keys else b""

    def event_keys(self, first: int, end: int) -> list[object] | None:
        """The extra keys as V1 publishes them with a block, in its order and without names; None if none."""
        keys: list[object] = [self.adapter] if self.adapter else []
        keys += [
            (span.content_hash, span.offset - first)
            for span in self.media
            if span.offset < end and span.offset + span.length > first
        ]
        if first == 0 and self.cache_salt:
            keys.append(self.cache_salt)
        return keys or None


NO_CONTEXT = HashContext()


class BlockHasher:
    """Hashes the full blocks of growing token sequences."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def extend(
        self, hashes: list[BlockHash], token_ids: Sequence[int], context: HashContext = NO_CONTEXT
    ) -> None:
        """Append the hashes of the blocks that ``token_ids`` fills beyond those already in ``hashes``."""
        size = self.block_size
        first = len(hashes) * size
        num_blocks = (len(token_ids) - first) // size
        if num_blocks <= 0:
            return
        num_tokens = num_blocks * size
        # All blocks at once: packed one by one they take nearly as long as their hashes.
        packed = struct.Struct(f"={num_tokens}I").pack(*token_ids[first : first + num_tokens])
        contents: Iterable[bytes] = struct.unpack(f"{_TOKEN_BYTES * size}s" * num_blocks, packed)
        if context.is_of_every_block or (first == 0 and context.cache_salt):
            # A salt alone enters the first block's hash, and through it all others, which need no keys.
            last = first + num_tokens if context.is_of_every_block else size
            starts = range(first, last, size)
            keys = chain((context.extra_keys(start, start + size) for start in starts), repeat(b""))
            contents = map(add, contents, keys)
        parent = hashes[-1] if hashes else ROOT_HASH
        append = hashes.append
        for content in contents:
            parent = sha256(parent + content).digest()
            append(parent)
