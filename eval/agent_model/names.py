"""Words, numbers and paths for tasks; training and evaluation draw from disjoint sets."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from string import ascii_lowercase

HELD_OUT_SHARE = 4
"""One word (and one large number) in this many is never seen in training."""


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ONSETS = _split("b c d f g h j k l m n p r s t v w z br cl dr fl gr kl pr qu sh st tr")
_VOWELS = _split("a e i o u ai ea ie oo y")
_CODAS = ["", "", "", "l", "m", "n", "r", "s", "t", "x", "nd", "rk"]
_ENGLISH = _split(
    """
    anchor apple april arrow atlas autumn badge bamboo barrel basket beacon berry bishop blossom border
    bottle bridge bronze bucket butter button cabin cactus camera candle canyon carbon carpet castle
    cedar cellar chapel cherry circle citrus cloud clover coffee comet copper coral corner cotton crater
    cricket crystal dagger desert diamond dolphin dragon eagle echo ember engine falcon feather fender
    fiddle finch flower forest fossil fountain galaxy garden garlic ginger glacier globe granite guitar
    hammer harbor hazel helmet hollow honey horizon island ivory jacket jasmine jungle kettle kitchen
    ladder lagoon lantern laurel lemon lily linen lizard lotus magnet maple marble meadow melon mirror
    monsoon mountain needle nickel nutmeg oasis olive onion orchid otter oyster paddle panda panther
    parrot pebble pepper piano pigeon pillow planet plum pocket pollen poplar prism pumpkin puzzle
    quarry rabbit radish raven ribbon river rocket saddle saffron sailor salmon sandal sapphire satin
    shadow shell silver spider spruce stable summit sunset tablet teapot temple thistle thunder tiger
    timber tulip tunnel turtle valley velvet violet walnut walrus wagon willow window winter yellow
    zebra zenith main test setup readme index server client users report
    """
)
_SUFFIXES = (".txt", ".md", ".log", ".csv", ".py", ".txt")


class Names:
    """Draws from one of the two sets; ``held_out`` selects it. Equal seeds give equal names.

    Without ``english`` it draws no dictionary words.
    """

    def __init__(self, rng: random.Random, held_out: bool, english: bool = True) -> None:
        self._rng = rng
        self._held_out = held_out
        self._shares = (0.12 if english else 0.0, 0.25, 0.1, 0.53)
        self._given: set[str] = set()

    def word(self) -> str:
        """Draws a word that this object has not returned before."""
        draws = (self._english, self._spliced, self._letters, self._syllables)
        (draw,) = self._rng.choices(draws, self._shares)
        return self._new(draw)

    def number(self, low: int, high: int) -> int:
        """Draws from ``low`` to ``high``; from 100 on, training and evaluation use different numbers."""
        if high < 200:
            return self._rng.randint(low, high)
        return int(self._drawn(lambda: str(self._rng.randint(max(low, 100), high))))

    def value(self) -> str:
        """Draws a value for a file: a word, a number, a version, a code."""
        kind = self._rng.random()
        if kind < 0.4:
            return self.word()
        if kind < 0.7:
            return str(self.number(100, 99999))
        if kind < 0.85:
            return f"{self.word()}-{self.number(100, 999)}"
        return ".".join(str(self.number(1, 30)) for _ in range(3))

    def folder(self) -> str:
        return self.word() if self._rng.random() < 0.75 else f"{self.word()}/{self.word()}"

    def file(self, suffix: str | None = None) -> str:
        """Draws a file name without its folder."""
        stem = self.word()
        kind = self._rng.random()
        if kind < 0.15:
            stem = f"{stem}_{self.word()}"
        elif kind < 0.3:
            stem = f"{stem}{self.number(1, 99)}"
        return stem + (suffix if suffix is not None else self._rng.choice(_SUFFIXES))

    def path(self, suffix: str | None = None) -> str:
        name = self.file(suffix)
        return name if self._rng.random() < 0.2 else f"{self.folder()}/{name}"

    def _new(self, draw: Callable[[], str]) -> str:
        """Draws until the word is new; repeats use made-up syllables, so that this ends."""
        word = self._drawn(draw)
        while word in self._given:
            word = self._drawn(self._syllables)
        self._given.add(word)
        return word

    def _drawn(self, draw: Callable[[], str]) -> str:
        while True:
            drawn = draw()
            if is_held_out(drawn) is self._held_out:
                return drawn

    def _english(self) -> str:
        return self._rng.choice(_ENGLISH)

    def _spliced(self) -> str:
        """Joins pieces of two or three words, so that no piece of a word predicts the next."""
        return "".join(self._piece() for _ in range(self._rng.choice((2, 2, 3))))

    def _piece(self) -> str:
        word = self._english()
        length = self._rng.randint(2, min(5, len(word)))
        start = self._rng.randint(0, len(word) - length)
        return word[start : start + length]

    def _letters(self) -> str:
        return "".join(self._rng.choices(ascii_lowercase, k=self._rng.randint(3, 7)))

    def _syllables(self) -> str:
        pick = self._rng.choice
        parts = [pick(_ONSETS) + pick(_VOWELS) for _ in range(self._rng.choice((2, 2, 3)))]
        return "".join(parts) + pick(_CODAS)


def is_held_out(name: str) -> bool:
    """Whether a word, or a number of three digits and more, belongs to evaluation."""
    return zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0
