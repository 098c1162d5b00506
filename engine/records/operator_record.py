"""The record of operators' changes to the engine cores of a server."""

from __future__ import annotations

import msgspec


class OperatorRecord(msgspec.Struct, frozen=True):
    """Operators' changes to the engine cores of a server: a core that comes later applies them before it
    serves. Adapters are not included: each is loaded by the first request that names it. The load board knows
    which cores are draining."""

    version: int = 0
    """Number of changes so far."""
    weights: str | None = None
    """The folder of the weights; None: that of the start."""
    level: int = 0
    """How deep the engine sleeps; 0: awake."""
    door: str = "open"
    """Which requests the cores take: a ``Door``."""
    paused: bool | None = None
    """Whether running requests are paused, too; None: not paused."""
    trace: tuple[bool, str | None] | None = None
    """Whether the scheduler's trace is on, and the name of its file; None: as configured."""
