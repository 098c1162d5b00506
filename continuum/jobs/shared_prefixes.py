"""How many blocks at the start of a chain others share, without comparing it with every other chain.

Each chain records its hash only at some depths, which grow geometrically: the lower and the upper bound of
the shared length differ by up to a half. This module does not know jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.kv_cache.block_hash import BlockHash

MAX_BLOCKS = 1 << 22
"""Maximum length of a chain."""
STEP = 1.5
"""Each depth is this many times the previous one: 22 depths for 100,000 tokens in blocks of 16."""

Checkpoints = tuple[bytes, ...]
"""Hashes of one chain at ``DEPTHS``, up to its length."""


def _depths() -> tuple[int, ...]:
    depths = [1]
    while depths[-1] < MAX_BLOCKS:
        depths.append(max(depths[-1] + 1, int(depths[-1] * STEP)))
    return tuple(depths)


DEPTHS = _depths()


def landmarks_of(block_hashes: Sequence[BlockHash], num_blocks: int) -> Checkpoints:
    """Landmarks of the first ``num_blocks`` of a chain."""
    marks = []
    for depth in DEPTHS:
        if depth > num_blocks:
            break
        marks.append(block_hashes[depth - 1][:8])
    return tuple(marks)


class SharedPrefixes:
    """All chains that may still be requested. Each landmark costs a dictionary entry."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def __len__(self) -> int:
        """The number of distinct landmarks."""
        return len(self._counts)

    def add(self, landmarks: Checkpoints) -> None:
        counts = self._counts
        for mark in landmarks:
            counts[mark] = counts.get(mark, 0) + 1

    def remove(self, landmarks: Checkpoints) -> None:
        """Removes a chain, which must be removed as often as it was added."""
        counts = self._counts
        for mark in landmarks:
            count = counts[mark] - 1
            if count:
                counts[mark] = count
            else:
                del counts[mark]

    def num_shared_blocks(self, landmarks: Checkpoints, apart_from: Iterable[Checkpoints]) -> int:
        """Upper bound of the blocks at the start of a chain, which was not added here, that others may share;
        ``apart_from`` are added chains that do not count."""
        index = self._deepest(landmarks, list(apart_from))
        return 0 if index is None else DEPTHS[index + 1] - 1

    def num_surely_shared_blocks(self, landmarks: Checkpoints) -> int:
        """Lower bound of the blocks at the start of a chain, which was not added here, that others share; the
        true number may be higher by up to a half."""
        index = self._deepest(landmarks, [])
        return 0 if index is None else DEPTHS[index]

    def _deepest(self, landmarks: Checkpoints, own: Sequence[Checkpoints]) -> int | None:
        """Index of the deepest landmark that other chains have, too; None if there is none."""
        for index in range(len(landmarks) - 1, -1, -1):
            mark = landmarks[index]
            num_own = sum(1 for each in own if index < len(each) and each[index] == mark)
            if self._counts.get(mark, 0) > num_own:
                return index
        return None
