"""wspt: the weighted shortest processing time first, as the queue of Dynamo's KV router has it."""

from __future__ import annotations

from engine.core.policy import CachedTokens, FcfsPolicy, WaitingKey
from engine.core.request import Request

HOST_CREDIT = 0.75
"""Dynamo's default: a cached token of host memory spares three quarters of computing it."""


class WsptPolicy(FcfsPolicy):
    """Smith's rule: 1 + priority, over the prompt's tokens that are not cached; the greatest goes first.

    A priority below 0, which is urgent here, adds to the weight; one above 0 has no like there. What is
    cached is looked up once, when the request comes. Whoever was preempted has left the router's queue and
    goes first. Nothing bounds a wait, and nothing is held.

    Left out: tiers of strict priority and classes of requests, of which a request here has none, and the
    quarter that a token on a disk is worth: it counts as one in host memory.
    """

    name = "wspt"
    _cached_tokens: CachedTokens

    def see_cache(self, cached_tokens: CachedTokens) -> None:
        self._cached_tokens = cached_tokens

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        if request.num_preemptions:
            return (0, 0.0)
        on_device, elsewhere = self._cached_tokens(request)
        num_new_tokens = request.num_tokens - on_device - HOST_CREDIT * elsewhere
        return (1, -(1 + max(0, -request.priority)) / max(1.0, num_new_tokens))
