"""How a prompt relates to the tips of its job: it continues one, or diverges from it.

A prompt that repeats an answered one begins a branch: sub-agents, votes and samples send equal prompts. The
decision uses block hashes, tokens at the seams, and the number of replies in the prompt where the API server
could count them. It decides nothing about blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from continuum.jobs.job import BranchTip
from engine.core.request import Request


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a prompt relates to the tips of its job; all fields are empty for the first turn of a branch."""

    tip: BranchTip | None = None
    """The tip that the prompt continues."""
    num_shared_blocks: int = 0
    diverged_at_token: int | None = None
    """Where the prompt diverges from the nearest tip, in full blocks: the first token of the block that
    differs. None if it does not diverge."""
    num_diverged_tokens: int = 0
    """Tokens of that tip after this point, which must be recomputed."""


NEW_BRANCH = Continuation()


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """A tip that its job abandoned, as shown by a prompt that continues no tip."""

    tip: BranchTip
    num_shared_blocks: int
    same_task: bool
    """Whether the prompt belongs to the same conversation, cut or edited: it holds the conversation's first
    prompt. If not, it shares only the beginning that all prompts of the agent have, and a summary follows."""


def num_blocks_to_share(num_prompt_tokens: int, block_size: int) -> int:
    """Number of blocks of a turn's prompt that a later prompt must share to continue it: all but the last
    full one. That block may already hold the start of the reply, as a template renders it before the reply
    exists."""
    return max(1, num_prompt_tokens // block_size - 1)


def prompt_tail(request: Request, block_size: int) -> tuple[int, ...]:
    """The prompt's tokens beyond the blocks to share; the whole prompt if it is shorter than a block."""
    num_tokens = request.num_prompt_tokens
    first = num_blocks_to_share(num_tokens, block_size) * block_size if num_tokens >= block_size else 0
    return tuple(request.all_token_ids[first:num_tokens])


def continuation_of(tips: Iterable[BranchTip], request: Request, block_size: int) -> Continuation:
    """Returns how the prompt of a new turn relates to the tips of its job."""
    near = [_Nearness(each, request, block_size) for each in tips]
    continued = max(
        (one for one in near if one.continues), key=lambda one: one.num_shared_blocks, default=None
    )
    if continued is not None:
        return _going_on(continued)
    parted = [one for one in near if one.parts]
    if not parted:
        return NEW_BRANCH
    return _parting(max(parted, key=lambda one: one.likeness))


def left_behind_by(tips: Iterable[BranchTip], request: Request, block_size: int) -> LeftBehind | None:
    """The tip that the job abandons with a prompt that continues no tip; None if there is none.

    The tip waits for no tool, and the prompt diverges from it within the tip's own prompt. Of several tips
    the one with the longest shared prefix is returned, the latest if equal.
    """
    at_rest = (each for each in tips if each.is_at_rest and not each.is_superseded)
    near = [_Nearness(each, request, block_size) for each in at_rest]
    left = [one for one in near if one.turns_away and (one.same_task or one.cuts_short)]
    if not left:
        return None
    nearest = max(left, key=lambda one: (one.num_shared_blocks, one.tip.ended_s))
    return LeftBehind(nearest.tip, nearest.num_shared_blocks, nearest.same_task)


def continuation_of_one(tip: BranchTip, request: Request, block_size: int) -> Continuation:
    """Like ``continuation_of``, for a prompt that is known to continue this tip."""
    return _going_on(_Nearness(tip, request, block_size))


def _going_on(near: _Nearness) -> Continuation:
    at_token, num_tokens = near.divergence()
    return Continuation(near.tip, near.num_shared_blocks, at_token, num_tokens)


def _parting(near: _Nearness) -> Continuation:
    """Returns the continuation of a turn whose prompt may have been edited since. If the prompt holds exactly
    one more reply and can continue no other turn, it continues that tip; else it may be a separate branch."""
    at_token, num_tokens = near.divergence()
    if near.is_next and near.tip.is_alone:
        return Continuation(near.tip, near.num_shared_blocks, at_token, num_tokens)
    return Continuation(None, 0, at_token, num_tokens)


class _Nearness:
    """How similar one tip is to a prompt."""

    __slots__ = ("_block_size", "_request", "num_shared_blocks", "tip")

    def __init__(self, tip: BranchTip, request: Request, block_size: int) -> None:
        self.tip = tip
        self.num_shared_blocks = tip.chain.num_shared(request.block_hashes)
        self._request = request
        self._block_size = block_size

    @property
    def continues(self) -> bool:
        """Whether the prompt is longer than the tip's prompt and contains it. The turn's output may differ,
        since a client may render the reply differently (white space, stripped reasoning)."""
        if self._request.num_prompt_tokens <= self.tip.num_prompt_tokens or self.holds_reply is False:
            return False
        needed = num_blocks_to_share(self.tip.num_prompt_tokens, self._block_size)
        return self.num_shared_blocks >= needed

    @property
    def holds_reply(self) -> bool | None:
        """Whether the prompt holds more replies than the tip's prompt; None if replies were not counted."""
        job = self._request.job
        now = job.num_replies if job is not None else None
        before = self.tip.num_replies
        return None if now is None or before is None else now > before

    @property
    def is_next(self) -> bool:
        """Whether the prompt holds exactly one more reply."""
        job = self._request.job
        now = job.num_replies if job is not None else None
        before = self.tip.num_replies
        return now is not None and before is not None and now == before + 1

    @property
    def parts(self) -> bool:
        """Whether the prompt continues this branch after an edit: it holds a later reply. If replies are not
        counted: it begins like the tip's prompt, is longer, and the job has no other branch."""
        if self.holds_reply is None:
            longer = self._request.num_prompt_tokens > self.tip.num_prompt_tokens
            return longer and self.num_shared_blocks > 0 and self.tip.is_alone
        return self.holds_reply

    @property
    def turns_away(self) -> bool:
        """Whether the prompt begins like the tip's prompt but does not contain all of it. A side question
        contains all of it, and so does a prompt that continues from the reply."""
        num_blocks = num_blocks_to_share(self.tip.num_prompt_tokens, self._block_size)
        return 0 < self.num_shared_blocks < num_blocks

    @property
    def same_task(self) -> bool:
        """Whether the prompt contains the first prompt of the tip's conversation."""
        return self.num_shared_blocks >= num_blocks_to_share(self.tip.num_task_tokens, self._block_size)

    @property
    def cuts_short(self) -> bool:
        """Whether the prompt is shorter than the tip's prompt, whose conversation had several turns."""
        tip = self.tip
        has_history = tip.num_prompt_tokens > tip.num_task_tokens
        return has_history and self._request.num_prompt_tokens < tip.num_prompt_tokens

    @property
    def likeness(self) -> tuple[int, int, float]:
        """Sort key: the longest shared prefix first, then the most replies (always fewer than the prompt's),
        then the latest."""
        return (self.num_shared_blocks, self.tip.num_replies or 0, self.tip.ended_s)

    def divergence(self) -> tuple[int | None, int]:
        """Where the prompt diverges from the tip, and how many of its tokens have to be recomputed."""
        end = min(len(self.tip.chain), len(self._request.block_hashes))
        if self.num_shared_blocks >= end:
            return None, 0
        first_token = self.num_shared_blocks * self._block_size
        return first_token, end * self._block_size - first_token
