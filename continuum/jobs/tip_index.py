"""Finds the turn that a prompt without a job id continues, by the beginning of the prompt.

A prompt is looked up from its end backwards, with one dictionary access per block, however many tips are
remembered. Two prompts with a common beginning are distinguished by every token of the turn that they would
continue, except for the few tokens that a chat template puts before a reply, which vary. Tenants are
separated here, cache salts by the hashes.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from operator import length_hint

from continuum.jobs.continuation import num_blocks_to_share
from continuum.jobs.job import Beginning, BranchTip
from engine.core.kv_cache.block_hash import BlockHash
from engine.core.request import Request

GENERATION_PROMPT_TOKENS = 8
"""Tokens that a chat template may put at the end of a prompt and omit where the reply follows."""
SEAM_TOKENS = 2
"""Tokens at the end of a plain text that may be merged with the following text."""
MAX_ANCHORS = 64
"""Maximum number of branching points in a prompt that are examined, from its end backwards."""
MAX_WITH_SAME_PROMPT = 32
"""Maximum number of indexed branch tips with the same prompt; beyond it, the oldest cannot be found."""


class TipIndex:
    """Branch tips by the prompt of their turn. Memory grows with the number of tips in it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_beginning: dict[Beginning, list[BranchTip]] = {}
        self._tail_lengths: dict[BlockHash, Counter[int]] = {}
        """Counts of the numbers of tokens that follow the blocks ending with this hash, over the known
        prompts."""
        self._num_tips = 0

    def __len__(self) -> int:
        return self._num_tips

    def beginning_of(self, tip: BranchTip, block_hashes: list[BlockHash]) -> Beginning | None:
        """The key of a tip. ``block_hashes`` are those of the turn's full blocks. None if the prompt is
        shorter than a block: the tip cannot be found again."""
        num_shared = num_blocks_to_share(tip.num_prompt_tokens, self._block_size)
        if len(block_hashes) < num_shared:
            return None
        return (tip.job.tenant, block_hashes[num_shared - 1], self._tail(tip))

    def add(self, tip: BranchTip) -> None:
        """Add a tip by its beginning, if it has one."""
        if tip.beginning is None:
            return
        _, anchor, tail = tip.beginning
        same_prompt = self._by_beginning.setdefault(tip.beginning, [])
        if not same_prompt:
            self._tail_lengths.setdefault(anchor, Counter())[len(tail)] += 1
        same_prompt.append(tip)
        self._num_tips += 1
        if len(same_prompt) > MAX_WITH_SAME_PROMPT:
            same_prompt.pop(0)
            self._num_tips -= 1

    def _tail(self, tip: BranchTip) -> tuple[int, ...]:
        if tip.num_prompt_tokens < self._block_size or tip.prompt_tail is None:
            return ()
        slack = SEAM_TOKENS if tip.num_replies is None else GENERATION_PROMPT_TOKENS
        return tip.prompt_tail[:-slack]

    def remove(self, tip: BranchTip) -> None:
        """Remove a tip, whether it is in the index or not."""
        same_prompt = self._by_beginning.get(tip.beginning) if tip.beginning is not None else None
        if same_prompt is None or tip.beginning is None or tip not in same_prompt:
            return
        same_prompt.remove(tip)
        self._num_tips -= 1
        if same_prompt:
            return
        del self._by_beginning[tip.beginning]
        _, anchor, tail = tip.beginning
        lengths = self._tail_lengths[anchor]
        lengths[len(tail)] -= 1
        if not lengths[len(tail)]:
            del lengths[len(tail)]
        if not lengths:
            del self._tail_lengths[anchor]

    def find(self, request: Request, tenant: str | None) -> BranchTip | None:
        """The tip with the longest prompt that this prompt continues; None if there is none."""
        if not self._num_tips:
            return None
        ahead = reversed(request.block_hashes[: request.num_prompt_tokens // self._block_size])
        # Runs in C and counts no blocks: a prompt of 100,000 tokens has thousands of them.
        for anchor in islice(filter(self._tail_lengths.__contains__, ahead), MAX_ANCHORS):
            num_blocks_before = length_hint(ahead)
            candidates = self._candidates(request, tenant, anchor, num_blocks_before + 1)
            if candidates:
                return max(candidates, key=lambda tip: tip.chain.num_shared(request.block_hashes))
        return None

    def _candidates(
        self, request: Request, tenant: str | None, anchor: BlockHash, num_shared_blocks: int
    ) -> list[BranchTip]:
        """Tips that share the blocks up to ``anchor`` and whose remaining prompt is contained in this one."""
        first = num_shared_blocks * self._block_size
        found: list[BranchTip] = []
        for length in self._tail_lengths[anchor]:
            tail = tuple(request.all_token_ids[first : first + length])
            for tip in self._by_beginning.get((tenant, anchor, tail), ()):
                if _holds_reply(request, tip, self._block_size):
                    found.append(tip)
        return found


def _holds_reply(request: Request, tip: BranchTip, block_size: int) -> bool:
    """Whether the prompt holds the tip's reply: by the count of replies if known; else at least half of the
    reply's tokens are unchanged."""
    if request.num_prompt_tokens <= tip.num_prompt_tokens:
        return False
    now = request.job.num_replies if request.job is not None else None
    if now is not None and tip.num_replies is not None:
        return now > tip.num_replies
    num_prompt_blocks = tip.num_prompt_tokens // block_size
    half_of_reply = max(0, len(tip.chain) - num_prompt_blocks) // 2
    return tip.chain.num_shared(request.block_hashes) >= num_prompt_blocks + half_of_reply
