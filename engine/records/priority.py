"""The range of a request's priority, of which smaller goes first."""

from __future__ import annotations

from engine.errors import RequestError

MAX_PRIORITY = 2**53
"""What JSON's readers represent exactly: traces have it."""


def check_priority(priority: int) -> None:
    """RequestError if the priority is out of range."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise RequestError(
            f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {priority}.", "priority"
        )
