"""Reads blocks that are kept outside of the engine: in a folder that servers share, or in a store."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from engine.core.outputs import RemoteReads
from engine.kv_transfer.block_store import BlockStore
from engine.kv_transfer.wire import chunks
from engine.worker.kv_tiers.copy_streams import Event
from engine.worker.kv_transfer.block_rows import BlockRows


class SavedReader:
    """The ``BlockSource`` of saved blocks."""

    def __init__(self, saved: BlockStore) -> None:
        self.saved = saved

    def fetch(self, reads: RemoteReads, rows: BlockRows, after: Sequence[Event]) -> None:
        for event in after:
            event.synchronize()
        names = iter(reads.names)
        for some in chunks(reads.block_ids, rows.block_bytes):
            self.saved.read(list(islice(names, len(some))), rows.buffer_of(len(some)))
            rows.scatter(some)

    def place_of(self, reads: RemoteReads) -> str:
        return str(self.saved.place)
