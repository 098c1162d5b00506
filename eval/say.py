"""Prints progress to standard error; standard output is for the tables."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
