"""Diagnoses why a prompt did not reuse the cached prefix of an earlier one.

The tokens decide, not the request: a change that does not affect the prompt does not count, and an equal
prefix that is no longer cached is not the client's fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.api.prompt_cache.fingerprint import STRIDE, Fingerprint, Part

Outcome = Literal["hit", "miss", "not_found", "unavailable"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Whether an earlier prompt's prefix was reused. ``unavailable``: it was not, but not because of the
    client: it was evicted, or its template renders it differently."""

    outcome: Outcome
    changed: Part | None = None
    """For ``miss``: the first part that differs."""
    missed_tokens: int = 0
    """For ``miss``: the tokens that would have been cached if nothing differed."""
    reusable_tokens: int = 0
    """For ``miss``: the earlier prompt's tokens that could be reused."""


NOT_FOUND = Diagnosis("not_found")


def diagnose(
    earlier: Fingerprint | None,
    now: Fingerprint,
    token_ids: Sequence[int],
    *,
    cached_tokens: int,
    block_size: int,
) -> Diagnosis:
    """Compares a prompt with an earlier one. ``cached_tokens``: number of its tokens that were in the cache.
    Only full blocks are cached, and the last token is always computed."""
    if earlier is None:
        return NOT_FOUND

    def in_blocks(num_tokens: int) -> int:
        return min(num_tokens, len(token_ids) - 1) // block_size * block_size

    reusable = in_blocks(earlier.num_tokens)
    num_shared = earlier.num_shared(token_ids)
    if cached_tokens >= reusable:
        return Diagnosis("hit")
    changed = earlier.changed(now)
    diverges = num_shared < min(earlier.num_tokens, len(token_ids))
    if diverges and changed is not None:
        return Diagnosis("miss", changed, reusable - cached_tokens, in_blocks(num_shared))
    # A template may end a prompt with tokens that it omits from the history.
    is_all_but_the_end = cached_tokens + max(STRIDE, block_size) >= reusable
    return Diagnosis("hit" if diverges and is_all_but_the_end else "unavailable")
