"""Lifetimes that clients request for their cached prompts: ``5m``, ``1h``; OpenAI's and Anthropic's.

They are lower bounds of a turn's pin, as long as holding is worth it; the receipt reports the result.
"""

from __future__ import annotations

import re

from engine.errors import RequestError

_LIFETIME = re.compile(r"([1-9][0-9]{0,4})([smh])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
MAX_LIFETIME_S = 24 * 3600.0


def lifetime_s(text: str) -> float | None:
    """The seconds of a lifetime; None if the text is not a lifetime, or longer than a day."""
    found = _LIFETIME.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0.0
    return seconds if 0 < seconds <= MAX_LIFETIME_S else None


def checked_lifetime_s(text: str, field: str) -> float:
    """The seconds of a lifetime; RequestError for any other text."""
    seconds = lifetime_s(text)
    if seconds is None:
        raise RequestError(f"{field} must be a lifetime of at most 24h, such as '30m' or '12h'.", field)
    return seconds
