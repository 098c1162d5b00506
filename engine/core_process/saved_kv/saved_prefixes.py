"""Finds the longest prefix of a prompt that is kept outside of the engine, and the turn that it continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.request import Request
from engine.core_process.core_part import CorePart
from engine.kv_transfer.block_store import BlockStore
from engine.kv_transfer.moved_turns import MovedTurns
from engine.records.kv_transfer import SavedPrefix


class SavedPrefixes(CorePart):
    """Looks there once per request, on its arrival: the scheduler itself sees no files and no store."""

    def __init__(
        self,
        saved: BlockStore,
        paused: MovedTurns | None,
        block_size: int,
        name_of: Callable[[BlockHash], bytes],
        *,
        must_load: bool,
        has_all: bool,
        cuts: bool,
    ) -> None:
        """``saved``: of the first rank. ``paused``: turns that moved; a store has none. ``block_size`` in
        tokens. ``name_of``: the name of a block there.
        ``must_load``: requests whose load fails end with an error. ``has_all``: all that is computed is
        saved; else only what pins held. ``cuts``: of a paused turn any number of blocks can be loaded; else
        only all, as windows and states are those of its end."""
        self._saved = saved
        self._paused = paused
        self._block_size = block_size
        self._name_of = name_of
        self._must_load = must_load
        self._has_all = has_all
        self._cuts = cuts

    def made(self, request: Request) -> None:
        self.find(request)

    def queueing(self, request: Request) -> None:
        """Look again if other weights have been loaded since, whose KV is elsewhere."""
        found = request.kv_transfer
        if isinstance(found, SavedPrefix) and found.place != self._saved.place:
            self.find(request)

    def loaded(self, saved: Path, requests: Iterable[Request]) -> None:
        self._saved = self._saved.at(saved)
        self._paused = None if self._paused is None else MovedTurns(saved.parent)
        for request in requests:
            self.queueing(request)

    def find(self, request: Request) -> None:
        """Note at the request the prefix that is there, and the paused turn that it continues."""
        found = None if self._paused is None else self._paused.find(self._hashes(request))
        num_blocks = 0
        if found is not None:
            num_blocks = min(found.num_blocks, found.num_saved_blocks)
            if num_blocks < found.num_saved_blocks and not self._cuts:
                num_blocks = 0
            if found.turn is not None and request.job is not None:
                request.job = msgspec.structs.replace(request.job, moved=found.turn)
        if self._has_all:
            names = [self._name_of(block_hash) for block_hash in self._hashes(request)]
            num_blocks = max(num_blocks, self._saved.num_held(names))
        num_tokens = num_blocks * self._block_size
        request.kv_transfer = (
            SavedPrefix(num_tokens, self._must_load, self._saved.place) if num_tokens else None
        )

    def _hashes(self, request: Request) -> Sequence[BlockHash]:
        """The blocks that may be loaded: the last token is computed."""
        return request.block_hashes[: (request.num_tokens - 1) // self._block_size]

    def stop(self) -> None:
        self._saved.close()
