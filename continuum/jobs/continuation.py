"""How a prompt relates to where the turns of a job ended: it goes on from one, or parts from it.

One that was answered and is asked again is a branch: sub-agents, votes and samples ask alike.

Told by block hashes and, at the seams, by tokens; and by how many replies the prompt holds,
where the API server could count them. Decides nothing about blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from continuum.jobs.job import BranchTip
from engine.core.request import Request


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a prompt does with the tips of its job; all empty for the first turn of a branch."""

    tip: BranchTip | None = None
    """The one it takes the place of."""
    num_shared_blocks: int = 0
    diverged_at_token: int | None = None
    """Where it parts from the tip nearest to it, in full blocks: the first token of the block that
    differs. None: it does not."""
    num_diverged_tokens: int = 0
    """Of that tip, beyond it: what has to be recomputed."""


NEW_BRANCH = Continuation()


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """A tip that its job went on without, taking nobody's place."""

    tip: BranchTip
    num_shared_blocks: int
    same_task: bool
    """The prompt is of the same conversation, cut short or changed: it holds its first prompt. If not it
    begins as that did, with what all prompts of the agent begin with, and a summary follows."""


def num_blocks_to_share(num_prompt_tokens: int, block_size: int) -> int:
    """Blocks of a turn's prompt that a later prompt must share to continue it: all but the last full one,
    which may already hold the start of the reply, as a template renders it when the reply is not there."""
    return max(1, num_prompt_tokens // block_size - 1)


def prompt_tail(request: Request, block_size: int) -> tuple[int, ...]:
    """The prompt's tokens beyond the blocks to share; all of a prompt of less than a block."""
    num_tokens = request.num_prompt_tokens
    first = num_blocks_to_share(num_tokens, block_size) * block_size if num_tokens >= block_size else 0
    return tuple(request.all_token_ids[first:num_tokens])


def continuation_of(tips: Iterable[BranchTip], request: Request, block_size: int) -> Continuation:
    """What the prompt of a new turn does with the tips of its job."""
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
    """The tip that a prompt which takes nobody's place has gone on without; None: there is none.

    It waits for no tool, and the prompt parts from it within the prompt that it had answered. Of several the
    one that has most in common with it, the latest of equals.
    """
    at_rest = (each for each in tips if each.is_at_rest and not each.is_superseded)
    near = [_Nearness(each, request, block_size) for each in at_rest]
    left = [one for one in near if one.turns_away and (one.same_task or one.cuts_short)]
    if not left:
        return None
    nearest = max(left, key=lambda one: (one.num_shared_blocks, one.tip.ended_s))
    return LeftBehind(nearest.tip, nearest.num_shared_blocks, nearest.same_task)


def continuation_of_one(tip: BranchTip, request: Request, block_size: int) -> Continuation:
    """Of a prompt that is known to go on from this tip."""
    return _going_on(_Nearness(tip, request, block_size))


def _going_on(near: _Nearness) -> Continuation:
    at_token, num_tokens = near.divergence()
    return Continuation(near.tip, near.num_shared_blocks, at_token, num_tokens)


def _parting(near: _Nearness) -> Continuation:
    """It goes on from a turn whose prompt has changed since. Where it holds just one reply more and there is
    no other turn it could mean, it still takes that one's place; else that may be a branch of its own."""
    at_token, num_tokens = near.divergence()
    if near.is_next and near.tip.is_alone:
        return Continuation(near.tip, near.num_shared_blocks, at_token, num_tokens)
    return Continuation(None, 0, at_token, num_tokens)


class _Nearness:
    """One tip as seen from a prompt."""

    __slots__ = ("_block_size", "_request", "num_shared_blocks", "tip")

    def __init__(self, tip: BranchTip, request: Request, block_size: int) -> None:
        self.tip = tip
        self.num_shared_blocks = tip.chain.num_shared(request.block_hashes)
        self._request = request
        self._block_size = block_size

    @property
    def continues(self) -> bool:
        """It is longer than that turn's prompt and contains it; the turn's output may differ, since a client
        may render the reply differently (white space, stripped reasoning)."""
        if self._request.num_prompt_tokens <= self.tip.num_prompt_tokens or self.holds_reply is False:
            return False
        needed = num_blocks_to_share(self.tip.num_prompt_tokens, self._block_size)
        return self.num_shared_blocks >= needed

    @property
    def holds_reply(self) -> bool | None:
        """Whether the prompt has a reply more than that turn's had; None: not counted."""
        job = self._request.job
        now, before = job.num_replies if job is not None else None, self.tip.num_replies
        return None if now is None or before is None else now > before

    @property
    def is_next(self) -> bool:
        """It has exactly one reply more."""
        job = self._request.job
        now, before = job.num_replies if job is not None else None, self.tip.num_replies
        return now is not None and before is not None and now == before + 1

    @property
    def parts(self) -> bool:
        """Whether this is the branch that it changed: it holds a later reply of it. Where replies are not
        counted: it begins as that did and is longer."""
        if self.holds_reply is None:
            longer = self._request.num_prompt_tokens > self.tip.num_prompt_tokens
            return longer and self.num_shared_blocks > 0 and self.tip.is_alone
        return self.holds_reply

    @property
    def turns_away(self) -> bool:
        """It begins as that turn's prompt did and does not hold all of it: a question asked
        beside it holds it whole, and so does a prompt that goes on from the reply."""
        num_blocks = num_blocks_to_share(self.tip.num_prompt_tokens, self._block_size)
        return 0 < self.num_shared_blocks < num_blocks

    @property
    def same_task(self) -> bool:
        """It holds what that turn's conversation began with."""
        return self.num_shared_blocks >= num_blocks_to_share(self.tip.num_task_tokens, self._block_size)

    @property
    def cuts_short(self) -> bool:
        """It is shorter than the prompt of that turn, whose conversation had gone on for a while."""
        tip = self.tip
        has_history = tip.num_prompt_tokens > tip.num_task_tokens
        return has_history and self._request.num_prompt_tokens < tip.num_prompt_tokens

    @property
    def likeness(self) -> tuple[int, int, float]:
        """Most in common first, then the turn with the most replies (they are all fewer), then the latest."""
        return (self.num_shared_blocks, self.tip.num_replies or 0, self.tip.ended_s)

    def divergence(self) -> tuple[int | None, int]:
        """Where the prompt parts from the tip, and how many of its tokens that makes be computed
        again."""
        end = min(len(self.tip.chain), len(self._request.block_hashes))
        if self.num_shared_blocks >= end:
            return None, 0
        first_token = self.num_shared_blocks * self._block_size
        return first_token, end * self._block_size - first_token
