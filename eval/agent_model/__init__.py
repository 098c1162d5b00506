"""The model in the box: its tasks, its tokenizer, its training and its score."""

from __future__ import annotations

from pathlib import Path

NAME = "box"
"""What a server calls it."""
MAX_REPLY_TOKENS = 256
"""Of one of its replies: asked what it was not made for, it may go on to the end of its context."""


def folder() -> Path:
    """The model folder: a part of this package."""
    return Path(__file__).with_name("weights")
