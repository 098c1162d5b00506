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


_SHARES = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95}
"""Shares of ``max_tokens`` for reasoning, as OpenRouter documents them for models with token budgets."""


def effort_arguments(effort: str | None, field: str) -> dict[str, Any]:
    """Template arguments for an effort level; RequestError, naming the field, for an unknown one. ``none``
    turns reasoning off if the model supports that, else it means the lowest level."""
    if effort is None:
        return {}
    if effort == "none":
        return {**thinking_arguments(thinks=False), "reasoning_effort": "low"}
    if effort not in _LEVELS:
        raise RequestError(f"{field} must be one of none, {', '.join(_LEVELS)}.", field)
    return {"reasoning_effort": _LEVELS[effort]}


def budget_of_effort(effort: str | None, max_tokens: int | None) -> int | None:
    """Maximum number of reasoning tokens at an effort level: a share of the request's limit, which leaves the
    rest for the answer; None: no limit."""
    if effort == "none":
        return 0
    share = _SHARES.get(effort or "")
    return None if share is None or max_tokens is None else int(share * max_tokens)


def thinking_arguments(*, thinks: bool) -> dict[str, Any]:
    """Template arguments that turn reasoning on or off, under both of their names."""
    return {"enable_thinking": thinks, "thinking": thinks}
