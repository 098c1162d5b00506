"""Drafts from a job's own past, and from the outputs of other jobs of its kind.

Agents repeat what they have read: a file that they edit, an error that they quote, a call like the last one.
So each job has an index of its prompt and outputs, which a turn extends only by its new tokens, and each kind
of job has an index of its jobs' outputs. Jobs are of one kind if they start with the same tokens under the
same owner, tenant and salt: nothing is ever proposed from another kind. Drafting from earlier text is the
idea of SuffixDecoding (Oliaro et al., arXiv:2411.04975); here each token is predicted from the longest known
contexts of job and kind, instead of copying one place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.config.speculative import SpeculativeConfig
from engine.core.drafts.memories import Memories, Memory, Scope
from engine.core.drafts.proposal import NOTHING, Proposal
from engine.core.drafts.token_index import CONTEXTS, Prediction, TokenIndex, context_keys
from engine.core.request import Request

MAX_NEW_TOKENS = 1024
"""Tokens that are indexed at a time, in about two milliseconds: a long prompt takes several steps."""
MAX_JOB_TOKENS = 262_144
"""Tokens of a job beyond which it gets no drafts."""
MAX_TOKENS = 2_097_152
"""Tokens of all jobs together; the least recent jobs are forgotten beyond it."""
MAX_KIND_TOKENS = 65_536
"""Tokens of one kind's outputs; beyond it the older half is forgotten."""
MAX_TOKENS_OF_KINDS = 1_048_576
"""Tokens of all kinds together; the least recent kinds are forgotten beyond it."""
MAX_KINDS = 1024
BYTES_A_TOKEN = 270
"""Approximate memory of a remembered token, in bytes."""
SURE = 0.9
"""A prediction with at least this rate is used without asking further indexes."""
NO_TOKEN = -1
"""Separates outputs in a kind's index: no context matches across it, and it is never proposed."""


@dataclass(slots=True)
class _Turn:
    """A running request."""

    memory: Memory
    scope: Scope
    is_private: bool
    """Whether its memory ends with it, as it has no job or another turn of its job runs, too."""
    num_indexed: int


class SuffixDrafter:
    """Proposes from one index per job and one per kind of jobs."""

    def __init__(self, config: SpeculativeConfig, job_of: Callable[[Request], str | None]) -> None:
        self._job_of = job_of
        self._longest = longest = config.suffix_decoding_max_tree_depth
        self._min_chance = config.suffix_decoding_min_token_prob
        self._jobs = Memories(config.suffix_decoding_max_cached_requests, MAX_TOKENS, longest)
        self._kinds = Memories(MAX_KINDS, MAX_TOKENS_OF_KINDS, longest)
        self._turns: dict[str, _Turn] = {}
        self._to_index: deque[tuple[Scope, Sequence[int]]] = deque()
        """Outputs that wait to be added to the index of their kind."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are indexed or wait to be."""
        waiting = sum(len(token_ids) for _, token_ids in self._to_index)
        return self._jobs.num_tokens + self._kinds.num_tokens + waiting

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        self._extend_kinds()
        turn = self._turns.get(request.request_id)
        if turn is None:
            turn = self._turns[request.request_id] = self._begin(request)
        if not self._is_indexed(turn, request.all_token_ids):
            return NOTHING
        kind = self._kinds.get(_kind_of(request))
        indexes = turn.memory.indexes if kind is None else turn.memory.indexes + kind.indexes
        return _follow(indexes, request.all_token_ids[-CONTEXTS[-1] :], max_tokens, self._min_chance)

    def ended(self, request: Request) -> None:
        turn = self._turns.pop(request.request_id, None)
        if turn is None:
            return
        turn.memory.user = None
        if turn.is_private:
            self._jobs.forget(turn.scope)
        self._to_index.append((_kind_of(request), [*request.output_token_ids, NO_TOKEN]))

    # ---- what is kept ----

    def _begin(self, request: Request) -> _Turn:
        """Begin a turn: keep the tokens that it shares with the job's last turn, and cut off the rest."""
        job = self._job_of(request)
        scope = _job_scope(request, job)
        is_private = job is None
        memory = self._jobs.open(scope)
        if memory.user is not None:
            scope = _job_scope(request, None)
            is_private = True
            memory = self._jobs.open(scope)
        memory.user = request.request_id
        num_common = _common(memory.index, request.all_token_ids)
        if len(memory.index) - num_common <= MAX_NEW_TOKENS:
            self._jobs.cut(memory, num_common)
        else:
            self._jobs.restart(memory)
        return _Turn(memory, scope, is_private, len(memory.index))

    def _is_indexed(self, turn: _Turn, tokens: Sequence[int]) -> bool:
        """Index some of the turn's new tokens; returns whether all of its tokens are indexed now."""
        num_known = turn.num_indexed
        if len(tokens) > MAX_JOB_TOKENS or turn.memory.is_forgotten:
            return False
        if len(tokens) > num_known:
            new = tokens[num_known : num_known + MAX_NEW_TOKENS]
            self._jobs.extend(turn.memory, new)
            turn.num_indexed += len(new)
        return turn.num_indexed == len(tokens)

    def _extend_kinds(self) -> None:
        """Index some of the output of requests that have ended."""
        if not self._to_index:
            return
        scope, token_ids = self._to_index.popleft()
        if len(token_ids) > MAX_NEW_TOKENS:
            self._to_index.appendleft((scope, token_ids[MAX_NEW_TOKENS:]))
        kind = self._kinds.open(scope)
        self._kinds.extend(kind, token_ids[:MAX_NEW_TOKENS])
        if len(kind.index) > MAX_KIND_TOKENS // 2:
            self._kinds.turn_over(kind)


def _follow(indexes: Sequence[TokenIndex], end: list[int], max_tokens: int, min_chance: float) -> Proposal:
    """Predict token by token, while the whole draft is likely enough."""
    drafts: list[int] = []
    chances: list[float] = []
    chance = 1.0
    while len(drafts) < max_tokens:
        likeliest = _likeliest(indexes, end)
        if likeliest is None or likeliest.token_id == NO_TOKEN:
            break
        chance *= likeliest.rate
        if chance < min_chance:
            break
        drafts.append(likeliest.token_id)
        chances.append(chance)
        end = [*end[1 - CONTEXTS[-1] :], likeliest.token_id]
    return Proposal(drafts, chances)


def _likeliest(indexes: Sequence[TokenIndex], end: Sequence[int]) -> Prediction | None:
    """The best prediction of these indexes; the first of equal ones."""
    best: Prediction | None = None
    keys = context_keys(end)
    for index in indexes:
        found = index.predict(keys)
        if found is not None and (best is None or found.rate > best.rate):
            best = found
            if found.rate >= SURE:
                break
    return best


def _common(index: TokenIndex, tokens: Sequence[int]) -> int:
    """Length of the common prefix, by binary search: comparing slices is faster than a loop over tokens."""
    low = 0
    high = min(len(index), len(tokens))
    if index.tokens[:high] == tokens[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if index.tokens[low:middle] == tokens[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _job_scope(request: Request, job: str | None) -> Scope:
    """The key of a job's memory; a request without a job has a separate one."""
    own = ("request", request.request_id) if job is None else ("job", job)
    return (request.owner, request.tenant, request.salt, *own)


def _kind_of(request: Request) -> Scope:
    """The key of a kind: owner, tenant, salt and first block, which is the beginning of a system prompt."""
    first = request.block_hashes[0].hex() if request.block_hashes else ""
    return (request.owner, request.tenant, request.salt, first)
