"""How hard a model is asked to think, in the dialects' words, as the arguments that chat templates read."""

from __future__ import annotations

from typing import Any

from engine.errors import RequestError

_LEVELS = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""The dialects' words, and the three that templates know."""


def effort_arguments(effort: str | None, field: str) -> dict[str, Any]:
    """For a template's arguments; RequestError, naming the field, for a word that is none of these.

    ``none`` is no thinking where the model can do without, else as little as it can.
    """
    if effort is None:
        return {}
    if effort == "none":
        return {**thinking_arguments(thinks=False), "reasoning_effort": "low"}
    if effort not in _LEVELS:
        raise RequestError(f"{field} must be one of none, {', '.join(_LEVELS)}.", field)
    return {"reasoning_effort": _LEVELS[effort]}


def thinking_arguments(*, thinks: bool) -> dict[str, Any]:
    """Templates know the switch under one name or the other."""
    return {"enable_thinking": thinks, "thinking": thinks}
