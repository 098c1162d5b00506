"""Maps the APIs' reasoning effort to the arguments that chat templates read."""

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
"""The APIs' effort levels, mapped to the three that templates know."""


def effort_arguments(effort: str | None, field: str) -> dict[str, Any]:
    """Template arguments for an effort level; RequestError, naming the field, for an unknown one.
    ``none`` turns reasoning off where the model can, else it is the lowest level."""
    if effort is None:
        return {}
    if effort == "none":
        return {**thinking_arguments(thinks=False), "reasoning_effort": "low"}
    if effort not in _LEVELS:
        raise RequestError(f"{field} must be one of none, {', '.join(_LEVELS)}.", field)
    return {"reasoning_effort": _LEVELS[effort]}


def thinking_arguments(*, thinks: bool) -> dict[str, Any]:
    """Template arguments that turn reasoning on or off, under both of their names."""
    return {"enable_thinking": thinks, "thinking": thinks}
