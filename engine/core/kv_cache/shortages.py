"""Why a waiting request did not fit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a waiting request did not fit."""

    num_hit_blocks: int
    num_missing: int
    num_freed: int
    """The value of ``BlockPool.num_freed`` at that time."""
