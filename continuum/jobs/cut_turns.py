"""Turns that their clients gave up: a request with the same prompt repeats the turn and keeps its place.

Clients that receive nothing for some minutes drop a request and send it again, which would lose its place.
Only prompts are compared here; blocks and pins are handled elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from continuum.jobs.continuation import num_blocks_to_share, prompt_tail
from continuum.jobs.job import Job, Turn
from engine.core.kv_cache.block_hash import BlockHash
from engine.core.request import Request

KEPT_S = 120.0
"""Seconds for which a turn is remembered: clients wait for seconds before they retry."""
MAX_QUESTIONS = 1024
MAX_OF_ONE = 32
"""Maximum number of prompts, and of turns for each; beyond these, the turn cut longest ago is forgotten."""

Question = tuple[str | None, str | None, int, BlockHash | None, tuple[int, ...]]
"""Tenant, the job's id as the client sends it, and what identifies the prompt."""


@dataclass(frozen=True, slots=True)
class CutTurn:
    """A turn that its client gave up before it was answered."""

    request_id: str
    job: Job
    number: int
    waits_since_s: float | None
    """Time since which it had waited; None if it had been scheduled already."""
    was_warm: bool
    """Whether its KV was retained for it."""
    cut_s: float


class CutTurns:
    """Cut turns by their prompts, the latest last."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._cut: OrderedDict[Question, deque[CutTurn]] = OrderedDict()

    def remember(self, turn: Turn, now: float) -> None:
        """Remember that the client has cut this turn."""
        question = self._question(turn.request)
        if question is None:
            return
        waited = turn.num_cached_tokens is None
        cut = CutTurn(
            turn.request.request_id,
            turn.job,
            turn.number,
            turn.waits_since_s if waited else None,
            turn.stands_warm,
            now,
        )
        self._cut.setdefault(question, deque(maxlen=MAX_OF_ONE)).append(cut)
        self._cut.move_to_end(question)
        if len(self._cut) > MAX_QUESTIONS:
            self._cut.popitem(last=False)

    def take(self, request: Request, now: float) -> CutTurn | None:
        """Removes and returns the turn that this request repeats, the first of several; each is repeated
        once."""
        self._forget_old(now)
        question = self._question(request) if self._cut else None
        turns = self._cut.pop(question, None) if question is not None else None
        if question is None or turns is None:
            return None
        in_time = (cut for cut in turns if now - cut.cut_s < KEPT_S)
        first = next(in_time, None)
        rest = deque(in_time, maxlen=MAX_OF_ONE)
        if rest:
            self._cut[question] = rest
            self._cut.move_to_end(question, last=False)  # not younger than those that it is put before
        return first

    def _forget_old(self, now: float) -> None:
        while self._cut:
            question, turns = next(iter(self._cut.items()))
            if now - turns[-1].cut_s < KEPT_S:
                return
            del self._cut[question]

    def asks_the_same(self, request: Request, other: Request) -> bool:
        """Whether one of the requests repeats the other."""
        question = self._question(request)
        return question is not None and question == self._question(other)

    def _question(self, request: Request) -> Question | None:
        """The key of the prompt; None for a request without a job or without block hashes."""
        job = request.job
        num_tokens = request.num_prompt_tokens
        if job is None:
            return None
        last: BlockHash | None = None
        if num_tokens >= self._block_size:
            num_blocks = num_blocks_to_share(num_tokens, self._block_size)
            if len(request.block_hashes) < num_blocks:
                return None
            last = request.block_hashes[num_blocks - 1]
        return (job.tenant, job.job_id, num_tokens, last, prompt_tail(request, self._block_size))
