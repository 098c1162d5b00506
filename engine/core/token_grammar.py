"""A grammar as the core sees it: tokens go in, and it says whether they may. Knows no library and no text."""

from __future__ import annotations

from typing import Protocol


class TokenGrammar(Protocol):
    """What the output of one request must follow, and how far it has come."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token of the output, the one that ends the request included; False if it is not allowed,
        and ever after."""

    @property
    def complete(self) -> bool:
        """Whether no token can follow: the request ends."""
