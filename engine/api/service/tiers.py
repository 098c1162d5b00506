"""OpenAI's service tiers, which are priorities here."""

from __future__ import annotations

from typing import Literal

ServiceTier = Literal["auto", "default", "scale", "flex", "priority"]

_PRIORITIES = {"priority": -1, "flex": 1}
"""Lower is earlier; the other tiers are 0, like requests without one."""


def priority_of(tier: ServiceTier | None, asked: int | None) -> int | None:
    """The priority of a request: the one that it names, else its tier's."""
    return _PRIORITIES.get(tier or "default") if asked is None else asked


def served_tier(tier: ServiceTier | None, asked: int | None, *, orders_by_priority: bool) -> str | None:
    """The tier that a response reports: what was asked for, if the policy makes a difference; None if the
    request names none."""
    is_served = orders_by_priority and asked is None and tier in _PRIORITIES
    return tier if is_served or tier is None else "default"
