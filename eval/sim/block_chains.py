"""Names the KV blocks of simulated prompts, so that only equal prefixes have equal hashes.

A hash here is eight bytes that stand for a content, not the digest of one: there are no tokens.
"""

from __future__ import annotations

from engine.core.kv_cache.block_hash import BlockHash
from eval.workloads.job import Job, Turn

_SCOPE_SIZE = 1 << 44
"""Ids reserved for one scope of recorded blocks, or one shared prefix: one recorded block (up to
``MAX_BLOCK_ID``) may stand for several simulated ones."""


class BlockNames:
    """Allocates block hashes; all jobs of a simulation share one instance."""

    def __init__(self, block_size: int, *, share_prefixes: bool = False) -> None:
        """``share_prefixes``: jobs with the same ``shared_prefix`` begin with the same blocks."""
        self.block_size = block_size
        self.share_prefixes = share_prefixes
        self._scopes: dict[str, int] = {}
        self._next_private = 0

    def private(self, count: int) -> list[BlockHash]:
        """Returns hashes that no other block has."""
        first = self._next_private
        self._next_private += count
        return [number.to_bytes(8, "big") for number in range(first, first + count)]

    def in_scope(self, scope: str, first: int, count: int) -> list[BlockHash]:
        """Returns hashes ``first`` and following of a scope, which are the same for every caller."""
        base = self._scopes.setdefault(scope, (len(self._scopes) + 1) * _SCOPE_SIZE) + first
        return [number.to_bytes(8, "big") for number in range(base, base + count)]


class JobChain:
    """The hash chain of one job, turn by turn; keeps one turn at a time in memory.

    A block of a turn gets its hash from the first that applies: the recording; the previous turn's block if
    the tokens are shared; the next turn's recorded block if that turn shares it (an answer is recorded as
    part of the next prompt); else a unique hash.
    """

    def __init__(self, names: BlockNames, job: Job) -> None:
        self._names = names
        self._job = job
        self._scope = job.block_scope or f"job {job.job_id}"
        fits = job.block_size and job.block_size % names.block_size == 0
        self._split = job.block_size // names.block_size if fits else 0
        """Simulated blocks per recorded block; 0 if recorded ids cannot be used."""
        self._chain: list[BlockHash] = []
        """Block hashes of the last served turn, prompt and output."""

    def turn(self, index: int) -> list[BlockHash]:
        """Hashes of all full blocks of this turn's prompt and output; call in order, once per turn."""
        job = self._job
        size = self._names.block_size
        turn = job.turns[index]
        num_blocks = (turn.input_tokens + turn.sampled_tokens) // size
        chain = self._recorded(turn)[:num_blocks]
        if not chain and self._names.share_prefixes and job.shared_prefix is not None:
            num_shared = min(job.shared_prefix_tokens, turn.input_tokens) // size
            chain = self._names.in_scope(f"prefix {job.shared_prefix}", 0, num_shared)
        chain += self._chain[len(chain) : min(turn.prefix_tokens // size, num_blocks)]
        if index + 1 < len(job.turns):
            following = job.turns[index + 1]
            predicted = self._recorded(following)[: min(following.prefix_tokens // size, num_blocks)]
            chain += predicted[len(chain) :]
        chain += self._names.private(num_blocks - len(chain))
        self._chain = chain
        return chain

    def _recorded(self, turn: Turn) -> list[BlockHash]:
        chain: list[BlockHash] = []
        split = self._split
        if split:
            for first, count in turn.block_runs:
                chain += self._names.in_scope(self._scope, first * split, count * split)
        return chain
