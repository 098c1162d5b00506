"""Reads blocks from the folder that servers share."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.outputs import RemoteReads
from engine.kv_transfer.saved_blocks import SavedBlocks
from engine.kv_transfer.wire import chunks
from engine.worker.kv_tiers.copy_streams import Event
from engine.worker.kv_transfer.block_rows import BlockRows


class SavedReader:
    """The ``BlockSource`` of saved blocks."""

    def __init__(self, saved: SavedBlocks) -> None:
        self.saved = saved

    def fetch(self, reads: RemoteReads, rows: BlockRows, after: Sequence[Event]) -> None:
        for event in after:
            event.synchronize()
        names = iter(reads.names)
        size = rows.block_bytes
        for some in chunks(reads.block_ids, size):
            buffer = rows.buffer_of(len(some))
            for index in range(len(some)):
                self.saved.read(next(names), buffer[index * size : (index + 1) * size])
            rows.scatter(some)

    def place_of(self, reads: RemoteReads) -> str:
        return str(self.saved.folder)
