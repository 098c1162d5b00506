"""wspt: the weighted shortest processing time first, as in the queue of Dynamo's KV router."""

from __future__ import annotations

from engine.core.policy import CachedTokens, FcfsPolicy, WaitingKey
from engine.core.request import Request

HOST_CREDIT = 0.75
"""Dynamo's default: a token cached in host memory saves three quarters of its computation."""


class WsptPolicy(FcfsPolicy):
    """Smith's rule: 1 + priority, over the prompt's tokens that are not cached; the greatest goes first.

    A priority below 0, which is urgent here, adds to the weight; one above 0 has no equivalent there. The
    cached tokens are looked up once, when the request arrives. A preempted request has left the router's
    queue and goes first. Nothing bounds a wait, and nothing is pinned.

    Left out: tiers of strict priority and classes of requests, which requests here do not have, and Dynamo's
    weight of a quarter for a token on disk, which counts here like one in host memory.
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
