"""A limit on the tokens of reasoning: beyond it, only the token that ends reasoning may follow.

It costs nothing until then: a request without another grammar has no masks before.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from engine.core.token_grammar import TokenGrammar
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import ThinkingLimit
from engine.structured_output.backend import MatcherGrammar

MAX_BEFORE = 4
"""Maximum number of tokens, which is white space, before reasoning that the answer opens itself."""


class ThinkingBudget:
    """A TokenGrammar: the limit, and the grammar that the output must follow, if any."""

    def __init__(
        self, limit: ThinkingLimit, inner: MatcherGrammar | None, ending_token_ids: set[int]
    ) -> None:
        self._limit = limit
        self._inner = inner
        self._ending_token_ids = ending_token_ids
        self._left: int | None = limit.num_tokens if limit.start is None else None
        """Tokens that reasoning may still have; None if it has not begun, or has ended."""
        self._num_before = 0 if limit.start is not None else MAX_BEFORE

    @property
    def only(self) -> int | None:
        """The one token that may follow; None if the limit is not reached."""
        return self._limit.end if self._left is not None and self._left <= 0 else None

    @property
    def matched(self) -> MatcherGrammar | None:
        """The grammar from which masks of other tokens are computed; None if all are allowed."""
        return self._inner

    @property
    def complete(self) -> bool:
        return self._inner is not None and self._inner.complete

    def accept(self, token_id: int) -> bool:
        allowed = self._inner is None or self._inner.accept(token_id)
        self._advance(token_id)
        return allowed

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """See ``TokenGrammar``."""
        most = len(token_ids)
        if self._inner is not None:
            most = self._inner.count_allowed(token_ids)
        ahead = copy(self)
        for count, token_id in enumerate(token_ids[:most]):
            if ahead.only not in (None, token_id) or token_id in self._ending_token_ids:
                return count
            ahead._advance(token_id)
        return most

    def forced(self, most: int) -> Sequence[int]:
        """See ``TokenGrammar``."""
        if self.only is not None:
            return [self.only][:most]
        return [] if self._inner is None else self._inner.forced(most)

    def ahead(self, token_ids: Sequence[int]) -> list[ThinkingBudget]:
        """Returns copies advanced by each of these tokens in turn, which are allowed."""
        inner = [None] * len(token_ids) if self._inner is None else self._inner.ahead(token_ids)
        copies: list[ThinkingBudget] = []
        for token_id, behind in zip(token_ids, inner, strict=True):
            following = copy(copies[-1] if copies else self)
            following._advance(token_id)
            following._inner = behind
            copies.append(following)
        return copies

    def _advance(self, token_id: int) -> None:
        if self._left is not None:
            self._left = None if token_id == self._limit.end else self._left - 1
        elif self._num_before < MAX_BEFORE:
            self._num_before += 1
            if token_id == self._limit.start:
                self._left = self._limit.num_tokens
                self._num_before = MAX_BEFORE


def with_budget(inner: MatcherGrammar | None, params: SamplingParams) -> TokenGrammar:
    """Returns the grammar of a request, with its limit on reasoning if it has one; at least one must
    exist."""
    if params.thinking_limit is None:
        assert inner is not None, "else nothing is constrained"
        return inner
    return ThinkingBudget(params.thinking_limit, inner, params.ending_token_ids)
