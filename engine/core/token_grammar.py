"""A grammar as the core sees it: it takes tokens and returns whether they are allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TokenGrammar(Protocol):
    """The grammar of one request's output, and its progress in it."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token of the output, also by the one that ends the request.

        False if the token is not allowed, and for every token after it.
        """

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may follow; it does not advance."""

    def forced(self, most: int) -> Sequence[int]:
        """At most ``most`` tokens of the text that must follow; it does not advance.

        The text is certain, but its split into tokens is the tokenizer's; of the last token only the
        beginning is certain.
        """

    @property
    def complete(self) -> bool:
        """Whether no token can follow, so that the request ends."""
