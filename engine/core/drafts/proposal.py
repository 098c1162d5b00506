"""Draft tokens, and how likely each of them is to be accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Proposal(NamedTuple):
    """Tokens that may follow those of a request."""

    token_ids: list[int]
    chances: Sequence[float]
    """For each token: the chance that it and all before it are accepted. It never rises."""


NOTHING = Proposal([], ())
