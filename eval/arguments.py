"""Option types that several commands share; a number out of range is an error that names its limit."""

from __future__ import annotations

import math
import os
from argparse import ArgumentTypeError, Namespace, _ActionsContainer


def add_processes(parser: _ActionsContainer) -> None:
    """Adds ``--processes``, for commands that make many runs."""
    parser.add_argument(
        "--processes",
        type=count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="Number of parallel processes",
    )


def given_flags(arguments: Namespace) -> set[str]:
    """Returns the flags of the command line, without their values."""
    return {word.partition("=")[0] for word in arguments.given if word.startswith("--")}


def count(text: str) -> int:
    """A whole number, at least 1."""
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def amount(text: str) -> float:
    """A finite number of at least 0."""
    value = float(text)
    if math.isinf(value):
        raise ArgumentTypeError(f"must be finite, got {text}")
    if not value >= 0:  # also refuses NaN
        raise ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def numbers(text: str) -> list[float]:
    """Numbers above 0, separated by commas, none twice."""
    values = [positive(part) for part in text.split(",")]
    if len(set(values)) < len(values):
        raise ArgumentTypeError(f"has a number twice: {text}")
    return values


def whole(text: str) -> int:
    """A whole number, at least 0."""
    value = int(text)
    if value < 0:
        raise ArgumentTypeError(f"must be 0 or more, got {value}")
    return value


def share(text: str) -> float:
    """A number above 0 and at most 1."""
    value = positive(text)
    if value > 1:
        raise ArgumentTypeError(f"must be at most 1, got {text}")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    value = amount(text)
    if value == 0:
        raise ArgumentTypeError("must be more than 0")
    return value
