"""What operators have made of the engine cores of a server, as one record."""

from __future__ import annotations

import msgspec


class OperatorRecord(msgspec.Struct, frozen=True):
    """What operators have made of the engine cores of a server: a core that comes later becomes the same
    before it serves. Adapters are not in it: each is loaded by the first request that names it; and which
    cores take no new requests the load board knows."""

    version: int = 0
    """How many changes there have been."""
    weights: str | None = None
    """The folder of the weights; None: that of the start."""
    level: int = 0
    """How deep the engine sleeps; 0: awake."""
    paused: bool | None = None
    """Whether what runs is paused, too; None: not paused."""
    trace: tuple[bool, str | None] | None = None
    """Whether the scheduler's trace is on, and the name of its file; None: as configured."""
