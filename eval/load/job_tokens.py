"""Synthetic tokens of a job that was recorded as counts: shared as recorded, deterministic for a seed.

Tokens are taken from an alphabet: ordinary token ids, or numbers that stand for words. Knows no server.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from eval.workloads.job import Job, Turn

Hashes = npt.NDArray[np.uint64]
Tokens = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class JobTokens:
    """The tokens of one job's prompts and outputs.

    A prompt starts with ``prefix_tokens`` of the previous turn's prompt and output. After them, a position
    has the content of its shared prefix, else of its block (``block_runs``), else content unique to the turn.
    Ends of prompts that no block covers, and outputs, take the content of the next turns' blocks.
    """

    def __init__(self, job: Job, alphabet: Tokens, seed: int) -> None:
        self._job = job
        self._alphabet = alphabet
        self._own_key = f"job {seed} {job.job_id}"
        scope = self._own_key if job.block_scope is None else f"scope {seed} {job.block_scope}"
        self._block_key = _key(f"blocks {scope}")
        self._shared_key = _key(f"shared {seed} {job.shared_prefix}")
        self._shared = 0 if job.shared_prefix is None else job.shared_prefix_tokens

    def prompt(self, index: int, history: Tokens) -> Tokens:
        """The prompt of turn ``index`` (from 0); ``history`` is the prompt and output of the turn before.

        A history that is shorter than the recorded prefix is kept whole; the prompt is as long as recorded.
        """
        turn = self._job.turns[index]
        kept = min(turn.prefix_tokens, len(history), turn.input_tokens)
        new = self.content(index, kept, turn.input_tokens)
        if len(new) and kept < len(history) and self._is_own(index, kept) and new[0] == history[kept]:
            # The shared prefix must not be longer than recorded.
            new[0] = self._alphabet[1 if history[kept] == self._alphabet[0] else 0]
        return np.concatenate((history[:kept], new))

    def output(self, index: int, num_tokens: int) -> Tokens:
        """Returns ``num_tokens`` of output of turn ``index``."""
        start = self._job.turns[index].input_tokens
        return self.content(index, start, start + num_tokens)

    def content(self, index: int, start: int, end: int) -> Tokens:
        """The content of positions ``start`` to ``end`` in turn ``index`` if no earlier turn defines it."""
        positions = np.arange(start, max(start, end), dtype=np.uint64)
        hashes = _mixed(_key(f"{self._own_key} {index}") + positions)
        self._fill_from_blocks(hashes, index, start)
        shared = min(self._shared, end) - start
        if shared > 0:
            hashes[:shared] = _mixed(self._shared_key + positions[:shared])
        return self._alphabet[(hashes % np.uint64(len(self._alphabet))).astype(np.int64)]

    def block_ids(self, index: int, start: int, end: int) -> Hashes:
        """The blocks, of this turn or of later ones that keep the positions, that define the content
        there."""
        size = self._job.block_size
        found = [
            _block_ids(turn)[first // size : -(-last // size)]
            for first, last, turn in self._covered(index, start, end)
        ]
        return np.concatenate(found) if found else np.empty(0, dtype=np.uint64)

    def _is_own(self, index: int, position: int) -> bool:
        return position >= self._shared and not len(self.block_ids(index, position, position + 1))

    def _fill_from_blocks(self, hashes: Hashes, index: int, start: int) -> None:
        """Overwrites the turn's own content with that of the blocks."""
        size = self._job.block_size
        for first, end, turn in self._covered(index, start, start + len(hashes)):
            positions = np.arange(first, end, dtype=np.int64)
            blocks = _block_ids(turn)[positions // size]
            offsets = (positions % size).astype(np.uint64)
            hashes[first - start : end - start] = _mixed(_mixed(self._block_key + blocks) + offsets)

    def _covered(self, index: int, start: int, end: int) -> list[tuple[int, int, Turn]]:
        """Stretches of ``start`` to ``end``, each with the first turn from ``index`` whose blocks hold it."""
        found: list[tuple[int, int, Turn]] = []
        turns = self._job.turns
        size = self._job.block_size
        while start < end:
            turn = turns[index]
            covered = min(size * sum(count for _, count in turn.block_runs), end)
            if covered > start:
                found.append((start, covered, turn))
                start = covered
            index += 1
            if index == len(turns):
                break
            end = min(end, turns[index].prefix_tokens)
        return found


def _block_ids(turn: Turn) -> Hashes:
    runs = [np.arange(first, first + count, dtype=np.int64) for first, count in turn.block_runs]
    return np.concatenate(runs).astype(np.uint64)


def blocks_of_several(jobs: Iterable[Job]) -> dict[str, Hashes]:
    """Returns, for each scope of blocks, the sorted ids that occur in more than one of the jobs."""
    by_scope: dict[str, list[Hashes]] = {}
    for job in jobs:
        if job.block_scope is not None:
            ids = [_block_ids(turn) for turn in job.turns if turn.block_runs]
            if ids:
                by_scope.setdefault(job.block_scope, []).append(np.unique(np.concatenate(ids)))
    found: dict[str, Hashes] = {}
    for scope, of_jobs in by_scope.items():
        ids_of_all, counts = np.unique(np.concatenate(of_jobs), return_counts=True)
        found[scope] = ids_of_all[counts > 1]
    return found


def _key(text: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little"))


def _mixed(values: Hashes) -> Hashes:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a random function of 64 bits."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
