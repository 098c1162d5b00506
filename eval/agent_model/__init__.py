"""The bundled model, and the tasks that it is trained for, which the live demo draws from."""

from __future__ import annotations

from pathlib import Path

NAME = "box"
"""The name under which a server serves it."""
MAX_REPLY_TOKENS = 256
"""Output limit: given requests that it was not trained for, the model may go on to the end of its context."""


def folder() -> Path:
    """Returns the model folder, a part of this package."""
    return Path(__file__).with_name("weights")
