"""Messages of requests and answers about KV that moves between servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec


class KVLeaseOrder(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Orders the server that computes a prompt for another one to lease the KV out when the turn ends."""

    lease_id: str
    """Unguessable id: any reader that knows it may read the blocks."""
    lease_s: float
    """How long the blocks are held for the reader, and again from each renewal on."""


class RemotePrefix(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Informs the server that continues that another one has computed the prompt's first tokens."""

    lease_id: str
    num_tokens: int
    host: str
    port: int
    """Where the first rank of the other server answers; each further rank one port higher."""
    lease_s: float = 30.0
    """How long each renewal holds it there."""
    must_load: bool = False
    """End the request with an error if the KV cannot be fetched, rather than recompute it."""


KVTransfer = KVLeaseOrder | RemotePrefix


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """The prompt's first tokens, whose KV is in a folder or store that servers share."""

    num_tokens: int
    must_load: bool = False
    """End the request with an error if the KV cannot be read, rather than recompute it."""
    place: Path | None = None
    """Where it was found: a place for each model and rank."""


PrefixSource = RemotePrefix | SavedPrefix
"""Source of a prefix that this engine need not compute."""


class KVLeased(msgspec.Struct, array_like=True, frozen=True):
    """The KV that is leased out at the end of a turn."""

    lease_id: str
    num_tokens: int
    block_ids: list[list[int]]
    """Ids of its blocks, one list for each group of layers."""
    host: str = ""
    port: int = 0
    """Where the first rank of the engine core that has them answers."""
