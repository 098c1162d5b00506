"""Events of the prefix cache and of pins as they are published: the first three are vLLM V1's, byte for byte.

A batch is an array; an event is a map with its ``type``, without the fields that have their default. A hash
is the last 64 bits of a block's, as an integer: readers of V1's events refuse bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What happened in a step."""

    ts: float
    """Wall time in seconds."""
    events: Sequence[KVCacheEvent | PinEvent]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Something entered or left the prefix cache."""


class BlockStored(KVCacheEvent):
    """Consecutive blocks of one sequence are cached from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Hash of the block before the first; None where the sequence begins."""
    token_ids: list[int]
    """Tokens of all the blocks, in order."""
    block_size: int
    lora_id: int | None
    """Always None: adapters have names only."""
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    """What each block's hash covers besides tokens: the adapter's name, media that touch it with
    their offset, the salt in the first block; None for a block without any."""
    group_idx: int | None = None
    """The KV cache group whose layers the blocks are of; groups of full attention come first."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    """The job, if the client named one, whose turn filled the blocks; others may share them."""
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks that are no longer cached."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """Nothing is cached any more, on any medium."""


class PinEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Something happened to a pin. Not V1's, and published under a separate topic."""

    pin_id: int
    job_id: str


class PinPlaced(PinEvent):
    """The blocks of a turn that ended are held for the job's next one."""

    request_id: str
    block_hash: int
    """Hash of the last block that a return would hit, which identifies all before it."""
    num_tokens: int
    """Tokens that a return would hit."""
    num_blocks: int
    """Blocks of the pool that the pin holds, over all groups; a state counts as the blocks that it takes."""
    held_until: float | None = None
    """Wall time in seconds; None: there is no deadline."""


class PinChanged(PinEvent):
    """The pin's deadline was moved, or it was cut to a shorter prefix and lives on."""

    block_hash: int
    num_tokens: int
    num_blocks: int
    held_until: float | None = None
    reason: str | None = None
    """Why it was cut, a reason as in ``PinEnded``; None: only the deadline was moved."""
    by: str | None = None
    """Request that the blocks were taken for."""


class PinEnded(PinEvent):
    """The pin holds nothing any more; its blocks are cached until they are evicted."""

    reason: str
    """``handed_over`` | ``expired`` | ``revoked`` | ``released`` | ``superseded``."""
    by: str | None = None


def event_hash(block_hash: bytes) -> int:
    """The integer that names a block in events, from its 32-byte hash."""
    return int.from_bytes(block_hash[24:32], "big")
