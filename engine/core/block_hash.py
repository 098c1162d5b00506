"""Chained hashes of full KV blocks: equal hash means equal tokens from the very start, in the same context.

hash(i) = SHA-256(hash(i-1) | tokens of block i | extra keys), as in V1. Extra keys keep apart prefixes whose
tokens are equal but whose KV is not: cache salt, adapter, media content.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from engine.messages import MediaSpan
    from engine.request import Request

BlockHash = bytes

ROOT_HASH: BlockHash = sha256(b"root").digest()
"""Parent of a first block."""


def request_block_hasher(block_size: int) -> Callable[[Request], list[BlockHash]]:
    """A function that hashes the full blocks a request has beyond those already hashed."""
    pack = struct.Struct(f"={block_size}q").pack

    def hash_new_blocks(request: Request) -> list[BlockHash]:
        tokens = request.all_token_ids
        # Called from Request.__init__ too, before block_hashes exists.
        known: list[BlockHash] = getattr(request, "block_hashes", [])
        start = len(known) * block_size
        if len(tokens) - start < block_size:
            return []
        parent = known[-1] if known else ROOT_HASH
        has_extra_keys = bool(request.cache_salt or request.adapter or request.media)
        hashes: list[BlockHash] = []
        for first in range(start, len(tokens) - block_size + 1, block_size):
            payload = parent + pack(*tokens[first : first + block_size])
            if has_extra_keys:
                payload += _extra_keys(request, first, first + block_size)
            parent = sha256(payload).digest()
            hashes.append(parent)
        return hashes

    return hash_new_blocks


def _extra_keys(request: Request, first: int, end: int) -> bytes:
    """Encoded keys of the block ``[first, end)``; empty if it has none."""
    keys: list[object] = []
    if first == 0 and request.cache_salt:
        keys.append(("salt", request.cache_salt))
    if request.adapter:
        keys.append(("adapter", request.adapter))
    keys.extend(("media", m.content_hash, m.offset - first) for m in _spans_in(request.media, first, end))
    return msgspec.msgpack.encode(keys) if keys else b""


def _spans_in(media: list[MediaSpan], first: int, end: int) -> list[MediaSpan]:
    return [span for span in media if span.offset < end and span.offset + span.length > first]
