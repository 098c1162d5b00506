"""Keeps the tokens and block hashes of ended turns, which a later request may continue by their ids. So
neither is sent, read or hashed again for the next turn.

A turn is continued once: its lists become those of the request. A request that continues it again, or after
it was forgotten, is sent with all of its tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from engine.core.request import KnownPrefix, Request
from engine.core_process.core_part import CorePart
from engine.records.messages import TurnPrefix
from engine.records.reported_stats import ContinuedStats, SchedulerStats

MOST_TOKENS = 1 << 21
"""The most tokens that are kept, at some 40 bytes each."""


class KeptTurns(CorePart):
    """A bounded store of turns: the longest kept are forgotten first. Thread-safe."""

    def __init__(self, max_tokens: int, block_size: int) -> None:
        """``max_tokens``: the capacity of the KV pool. A turn without its KV may as well be sent whole."""
        self._max_tokens = min(max_tokens, MOST_TOKENS)
        self._block_size = block_size
        self._num_tokens = 0
        self._turns: OrderedDict[str, KnownPrefix] = OrderedDict()
        self._lock = Lock()
        self._counts: ContinuedStats | None = None

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def num_tokens(self) -> int:
        """Tokens of all turns that are kept."""
        return self._num_tokens

    def request_ended(self, request: Request, now: float) -> None:
        """Keep a turn that may be continued.

        Otherwise keep what the request continued again: its client may retry.
        """
        if request.status.complete and request.keeps_tokens:
            self.keep(request.known_prefix())
        elif request.continues is not None:
            self.keep(request.known_prefix().cut(request.continues, self._block_size))

    def keep(self, known: KnownPrefix) -> None:
        """Keep a turn, whose lists no one else uses."""
        with self._lock:
            self._turns[known.request_id] = known
            self._num_tokens += len(known.token_ids)
            while self._num_tokens > self._max_tokens:
                _, forgotten = self._turns.popitem(last=False)
                self._num_tokens -= len(forgotten.token_ids)

    def take(self, prefix: TurnPrefix) -> KnownPrefix | None:
        """The turn, cut to as many tokens as the prefix has; None if it is not kept or its tokens differ."""
        with self._lock:
            counts = self._counts = self._counts or ContinuedStats()
            known = self._turns.get(prefix.request_id)
            if known is None or not _begins_with(known.token_ids, prefix):
                counts.num_forgotten += 1
                return None
            counts.num_known += 1
            del self._turns[prefix.request_id]
            self._num_tokens -= len(known.token_ids)
        return known.cut(prefix, self._block_size)

    def fill_stats(self, stats: SchedulerStats) -> None:
        stats.continued = self.take_counts()

    def take_counts(self) -> ContinuedStats | None:
        """How often turns were requested since the last call; None if never."""
        if self._counts is None:
            return None
        with self._lock:
            counts = self._counts
            self._counts = None
        return counts


def _begins_with(token_ids: list[int], prefix: TurnPrefix) -> bool:
    end = prefix.num_tokens
    return len(token_ids) >= end and token_ids[end - len(prefix.tail) : end] == prefix.tail
