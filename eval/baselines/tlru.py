"""tlru: tail-optimized LRU (arXiv 2510.15152), as SGLang evicts with ``--radix-eviction-policy tlru``."""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.policy import FcfsPolicy, Pin, PolicyContext, PolicyDescription, StalePrefix
from engine.core.request import Request


class TlruPolicy(FcfsPolicy):
    """First come, first served, over a cache that evicts the ends of conversations first, the oldest first.

    A turn that adds Q tokens to L computes at most ξ if L + Q - ξ of the L are cached. Blocks beyond that are
    evicted before all others, which are evicted by LRU; on other tiers too, there the latest first. Only ξ -
    Q matters, here ``tokens``. Every ended request counts as a conversation. Metrics count these blocks as
    superseded.
    """

    name = "tlru"

    def __init__(self, context: PolicyContext, tokens: int = 8192) -> None:
        """``tokens``: how many a returning turn may recompute; by default as many as one step computes."""
        self._block_size = context.block_size
        self._tokens = tokens
        self._before: list[StalePrefix] = []
        self._ended: list[StalePrefix] = []

    def describe(self) -> PolicyDescription:
        return PolicyDescription(self.name, {"tokens": self._tokens})

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        num_kept = -(-max(0, request.num_tokens - self._tokens) // self._block_size)
        block_hashes = request.block_hashes[num_kept : request.num_computed_tokens // self._block_size]
        if block_hashes:
            self._ended.append(StalePrefix(block_hashes, num_kept, None, request.request_id))
        return None

    def changed_keys(self, now: float) -> Iterable[Request]:
        self._before = self._ended
        self._ended = []
        return ()

    def take_superseded(self) -> Iterable[StalePrefix]:
        # Repeat each until two steps are planned, as one under way may still hold the blocks.
        return [*self._before, *self._ended]
