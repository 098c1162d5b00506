"""Where things are at home: a table of fixed size that API server processes share, so that they agree.

A key is a number of 64 bits: a job's, or that of the beginning of a prompt. Each key has one slot, and who
writes last has it. So memory is bounded, nothing is locked, and what is lost is found again by a shorter
beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

CHUNK_TOKENS = 64
"""Beginnings of prompts are known to this many tokens. A prompt of 100,000 tokens has 1,562 of them."""

_ENGINE_BITS = 12
_ENGINE_MASK = (1 << _ENGINE_BITS) - 1
_WORD_MASK = (1 << 64) - 1
MAX_ENGINES = _ENGINE_MASK


def key_of(*names: str | None) -> int:
    """The key of names, such as an owner's and a job's; None is no name, and differs from every name."""
    digest = blake2b(digest_size=8)
    for name in names:
        text = b"" if name is None else b"\1" + name.encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(4, "little") + text)
    return int.from_bytes(digest.digest(), "little")


def beginnings(
    tokens: Sequence[int], root: int, *, known: int = 0, known_key: int | None = None
) -> Iterator[int]:
    """Keys of the beginnings of a prompt: of its first chunk, of its first two, and so on.

    ``root``: the key of those who share prefixes. ``known``: chunks whose keys are not asked for, the last of
    which has ``known_key``.
    """
    key = root if known_key is None else known_key
    for start in range(known * CHUNK_TOKENS, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        # The hash of a tuple of integers is the same in every process.
        key = hash((key, tuple(tokens[start : start + CHUNK_TOKENS]))) & _WORD_MASK
        yield key


class HomeTable:
    """Engine numbers by key."""

    def __init__(self, words: memoryview) -> None:
        """``words``: the table, of 64 bits each, all 0 when it is new; their number is a power of two, 4,096
        at least."""
        self._words = words
        self._mask = len(words) - 1
        if len(words) & self._mask or len(words) <= _ENGINE_MASK:
            raise ValueError(f"the number of words must be a power of two from 4096, got {len(words)}")

    def __getitem__(self, key: int) -> int | None:
        """The engine where this key is at home; None if it is not known."""
        word = self._words[self._slot(key)]
        if (word ^ key) & ~_ENGINE_MASK & _WORD_MASK or not word & _ENGINE_MASK:
            return None
        return int(word & _ENGINE_MASK) - 1

    def __setitem__(self, key: int, engine: int) -> None:
        self._words[self._slot(key)] = (key & ~_ENGINE_MASK) | (engine + 1)

    def forget(self, engine: int) -> None:
        """Nothing is at home there any more. Takes a tenth of a second."""
        words = self._words
        for slot, word in enumerate(words):
            if word & _ENGINE_MASK == engine + 1:
                words[slot] = 0

    def _slot(self, key: int) -> int:
        # A word lacks the key's lowest bits. Its place tells them, as the other bits that chose it are known.
        return (key ^ (key >> 40)) & self._mask
