"""Jump ahead: where a grammar leaves one text only, its tokens are drafts, in front of a drafter's.

They are verified as all drafts are, so what is sampled is what would have been: a model may divide the text
into other tokens than its tokenizer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from engine.core.drafts.proposal import Proposal

USUAL = 0.98
"""Chance that a model divides forced text as its tokenizer does, for each token."""
LAST = 0.5
"""The same of the last token, which may be the beginning of a longer one that is not forced."""


def behind_forced(forced: Sequence[int], proposal: Proposal) -> Proposal:
    """Forced tokens, and what a drafter proposes behind them.

    A drafter that proposes the same tokens, or another one for the last of them, is heard behind them: it has
    learned how the text goes on. One that proposes others has not seen the grammar.
    """
    if not forced:
        return proposal
    sure = forced[:-1]
    if list(sure) == proposal.token_ids[: len(sure)] and len(proposal.token_ids) > len(sure):
        return _raised(proposal, len(sure))
    chances = _usual(len(forced))
    chances[-1] *= LAST
    return Proposal(list(forced), chances)


def _raised(proposal: Proposal, num_sure: int) -> Proposal:
    """The drafter's tokens, of which the first are as good as sure, so that all behind are likelier."""
    if not num_sure:
        return proposal
    before, chances = proposal.chances[num_sure - 1], _usual(num_sure)
    behind = chances[-1]
    chances += [min(behind, behind * chance / before) for chance in proposal.chances[num_sure:]]
    return Proposal(proposal.token_ids, chances)


def _usual(count: int) -> list[float]:
    """The chance of each of so many tokens: that it and all before it are divided as usual."""
    return list(accumulate([USUAL] * count, mul))
