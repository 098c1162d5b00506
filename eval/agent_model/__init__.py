"""The model in the box: its tasks, its tokenizer, its training and its score."""

from __future__ import annotations

from pathlib import Path

NAME = "box"
"""What a server calls it."""


def folder() -> Path:
    """The model folder: a part of this package."""
    return Path(__file__).with_name("weights")
