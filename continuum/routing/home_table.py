"""The home engine of jobs and prompt prefixes: a table of fixed size that API server processes share.

A key is a 64-bit number of a job or of a prefix of a prompt. Each key has one slot, and the last writer
overwrites it. So memory is bounded and nothing is locked; a prefix that was overwritten is found again by a
shorter prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

CHUNK_TOKENS = 64
"""Prefixes of prompts are recorded at multiples of this many tokens: 1,562 for a prompt of 100,000 tokens."""

_ENGINE_BITS = 12
_ENGINE_MASK = (1 << _ENGINE_BITS) - 1
_WORD_MASK = (1 << 64) - 1
MAX_ENGINES = _ENGINE_MASK


def key_of(*names: str | None) -> int:
    """The key of names, such as an owner's and a job's; None stands for a missing name, and differs from
    every name."""
    digest = blake2b(digest_size=8)
    for name in names:
        text = b"" if name is None else b"\1" + name.encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(4, "little") + text)
    return int.from_bytes(digest.digest(), "little")


def beginnings(
    tokens: Sequence[int], root: int, *, known: int = 0, known_key: int | None = None
) -> Iterator[int]:
    """Yields keys of the prefixes of a prompt: of its first chunk, of its first two, and so on.

    ``root``: the key of those who share prefixes. ``known``: number of chunks whose keys are skipped; the
    last of them has ``known_key``.
    """
    key = root if known_key is None else known_key
    for start in range(known * CHUNK_TOKENS, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        # The hash of a tuple of integers is the same in every process.
        key = hash((key, tuple(tokens[start : start + CHUNK_TOKENS]))) & _WORD_MASK
        yield key


class HomeTable:
    """Maps keys to engine numbers."""

    def __init__(self, words: memoryview) -> None:
        """``words``: the table of 64-bit words, all 0 when it is new; their number is a power of two, at
        least 4,096."""
        self._words = words
        self._mask = len(words) - 1
        if len(words) & self._mask or len(words) <= _ENGINE_MASK:
            raise ValueError(f"the number of words must be a power of two from 4096, got {len(words)}")

    def __getitem__(self, key: int) -> int | None:
        """The home engine of this key; None if unknown."""
        word = self._words[self._slot(key)]
        if (word ^ key) & ~_ENGINE_MASK & _WORD_MASK or not word & _ENGINE_MASK:
            return None
        return int(word & _ENGINE_MASK) - 1

    def __setitem__(self, key: int, engine: int) -> None:
        self._words[self._slot(key)] = (key & ~_ENGINE_MASK) | (engine + 1)

    def forget(self, engine: int) -> None:
        """Removes all keys whose home is this engine. Takes a tenth of a second."""
        words = self._words
        for slot, word in enumerate(words):
            if word & _ENGINE_MASK == engine + 1:
                words[slot] = 0

    def _slot(self, key: int) -> int:
        # A word omits the key's lowest bits: the slot determines them, as the word has the other bits that
        # chose it.
        return (key ^ (key >> 40)) & self._mask
