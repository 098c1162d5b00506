"""Checks once whether the Hugging Face hub is reachable: its client would retry for minutes for each file."""

from __future__ import annotations

import re
from functools import cache

ANSWERS_WITHIN_S = 10.0
_UNREACHABLE = re.compile("Connect|Timeout")
"""Matches the names of HTTP libraries' errors for unreachable hosts."""


@cache
def hub_answers(model: str) -> bool:
    """False if the hub is unreachable, or must not be called: then only files downloaded before are
    available."""
    from huggingface_hub import HfApi, constants  # needed only for a hub name

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        HfApi().model_info(model, timeout=ANSWERS_WITHIN_S)
    except Exception as error:
        is_silent = isinstance(error, ConnectionError | TimeoutError)
        return not is_silent and _UNREACHABLE.search(type(error).__name__) is None
    return True
