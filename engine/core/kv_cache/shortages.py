"""Why a waiting request did not fit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a waiting request did not fit."""

    num_hit_blocks: int
    num_missing: int
    num_freed: int
    """What ``BlockPool.num_freed`` was at that time."""
