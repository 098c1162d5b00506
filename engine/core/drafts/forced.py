"""Jump-ahead decoding: where a grammar allows only one text, its tokens are drafts, before a drafter's.

They are verified as all drafts are, so they do not change what is sampled: a model may split the text into
other tokens than its tokenizer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from engine.core.drafts.proposal import Proposal

USUAL = 0.98
"""Chance, per token, that a model splits forced text as its tokenizer does."""
LAST = 0.5
"""Further factor for the last token, which may be the start of a longer one that is not forced."""


def behind_forced(forced: Sequence[int], proposal: Proposal) -> Proposal:
    """The forced tokens, continued by a drafter's where it agrees with them.

    If the drafter proposes the same tokens, except perhaps for the last one, its whole proposal is used: it
    has learned how the text continues. Otherwise it does not know the grammar.
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
    """The drafter's tokens with raised chances: the first ``num_sure`` are as likely as forced ones."""
    if not num_sure:
        return proposal
    before = proposal.chances[num_sure - 1]
    chances = _usual(num_sure)
    behind = chances[-1]
    chances += [min(behind, behind * chance / before) for chance in proposal.chances[num_sure:]]
    return Proposal(proposal.token_ids, chances)


def _usual(count: int) -> list[float]:
    """For each of ``count`` forced tokens: the chance that it and all before it are split as usual."""
    return list(accumulate([USUAL] * count, mul))
