"""Which requests a server takes while it is drained."""

from __future__ import annotations

from enum import StrEnum

DRAINING = "This server is being drained: send the request to another one."
"""Why a request is refused."""


class Door(StrEnum):
    """Which requests a core takes."""

    OPEN = "open"
    """All."""
    LEAVING = "leaving"
    """Turns of jobs that it knows, and of those that these wait for."""
    CLOSED = "closed"
    """None."""
