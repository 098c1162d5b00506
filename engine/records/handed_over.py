"""What an engine core that is drained or stops has handed over."""

from __future__ import annotations

import msgspec

HAND_OVER = "hand_over"
"""The utility of a core that saves what its pins hold, and what later turns leave; its argument is the time
for it, in seconds."""
END_HANDOVER = "end_handover"
"""The utility of a core whose jobs stay after all."""


class HandedOver(msgspec.Struct, kw_only=True):
    """Paused turns whose KV was saved, and those whose was not."""

    turns: int = 0
    """Paused turns whose KV is saved, now or before."""
    tokens: int = 0
    """Tokens whose KV these had."""
    left: int = 0
    """Paused turns for which there was no time or no room: their KV must be recomputed."""
