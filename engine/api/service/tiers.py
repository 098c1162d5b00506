"""OpenAI's service tiers, which are priorities here. A key may have one: the best of its requests."""

from __future__ import annotations

from typing import Literal

ServiceTier = Literal["auto", "default", "scale", "flex", "priority"]

KeyTier = Literal["flex", "default", "priority"]

_PRIORITIES = {"priority": -1, "default": 0, "flex": 1}
"""Lower is earlier. The other tiers are like requests that name none: 0, or the key's."""
_TIERS = {priority: tier for tier, priority in _PRIORITIES.items()}


def priority_of(tier: ServiceTier | None, asked: int | None) -> int | None:
    """The priority of a request: the one that it names, else its tier's."""
    return _PRIORITIES.get(tier or "auto") if asked is None else asked


def allowed_priority(asked: int | None, best: KeyTier | None) -> int:
    """The priority of a request whose key has this tier: the tier's, or a lower one that it asks for."""
    if best is None:
        return asked or 0
    return _PRIORITIES[best] if asked is None else max(asked, _PRIORITIES[best])


def served_tier(
    tier: ServiceTier | None, asked: int | None, priority: int, *, orders_by_priority: bool
) -> str | None:
    """The tier that a response reports: that of its ``priority``, if the policy makes a difference and no
    other one was ``asked`` for; None if the request names none."""
    if tier is None:
        return None
    return _TIERS[priority] if orders_by_priority and asked is None else "default"
