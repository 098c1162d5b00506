"""Whether the Hugging Face hub is there: asked once, as its client asks for each file again for minutes."""

from __future__ import annotations

import re
from functools import cache

ANSWERS_WITHIN_S = 10.0
_UNREACHABLE = re.compile("Connect|Timeout")
"""What errors of HTTP libraries are called where nobody answers."""


@cache
def hub_answers(model: str) -> bool:
    """False where nobody answers, or nobody is to be asked: there is only what was downloaded before."""
    from huggingface_hub import HfApi, constants  # needed only for a hub name

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        HfApi().model_info(model, timeout=ANSWERS_WITHIN_S)
    except Exception as error:
        is_silent = isinstance(error, ConnectionError | TimeoutError)
        return not is_silent and _UNREACHABLE.search(type(error).__name__) is None
    return True
