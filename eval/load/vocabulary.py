"""Ordinary tokens and words of a server's tokenizer, for synthetic prompts.

An ordinary token is one that plain words give, so none is special or outside the vocabulary.
"""

from __future__ import annotations

import asyncio
import random

from eval.errors import ServerError
from eval.load.client import ServerClient

MIN_TOKENS = 16
"""Fewest tokens: with fewer, synthetic texts that must differ would agree by chance."""
MIN_WORDS = 16
NUM_MADE_WORDS = 1200
NUM_CHUNKS = 4
MAX_PARALLEL_CALLS = 8

_COMMON_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word
but not what all were we when your can said there use an each which she do how their if will up other about
out many then them these so some her would make like him into time has look two more write go see number no
way could people my than first water been call who oil its now find long down day did get come made may part
over new sound take only little work know place year live me back give most very after thing our just name
good sentence man think say great where help through much before line right too mean old any same tell boy
follow came want show also around form three small set put end does another well large must big even such
because turn here why ask went men read need land different home us move try kind hand picture again change
off play spell air away animal house point page letter mother answer found study still learn should world a
b c d e f g h i j k l m n o p q r s t u v w x y z self def return import class for print None True False
list dict str int float type name value file path text data test code error key index size line count start
stop open close run set get add load save config option default
"""
COMMON_WORDS = tuple(dict.fromkeys(_COMMON_TEXT.split()))


async def learn_token_ids(client: ServerClient) -> list[int]:
    """Returns ordinary token ids, sorted. Raises ServerError if the tokenizer gives too few."""
    words = [*COMMON_WORDS, *_pronounceable_words()]
    chunks = [words[start::NUM_CHUNKS] for start in range(NUM_CHUNKS)]
    encoded = [await client.tokenize(" ".join(chunk)) for chunk in chunks]
    ids = {token for tokens in encoded for token in tokens} - _marks(encoded)
    if len(ids) < MIN_TOKENS:
        raise ServerError(
            f"The server's tokenizer knows {len(ids)} ordinary tokens; {MIN_TOKENS} are needed."
        )
    return sorted(ids)


def _marks(encoded: list[list[int]]) -> set[int]:
    """Returns tokens that a tokenizer adds around every text although special tokens are off."""
    firsts = {tokens[0] for tokens in encoded}
    lasts = {tokens[-1] for tokens in encoded}
    return {mark for ends in (firsts, lasts) if len(ends) == 1 for mark in ends}


def _pronounceable_words() -> list[str]:
    """Returns pronounceable words, which split into many short tokens."""
    rng = random.Random("vocabulary")
    syllables = [c + v for c in "bcdfghjklmnprstvwz" for v in "aeiou"]
    return ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(NUM_MADE_WORDS)]


async def learn_words(client: ServerClient) -> tuple[list[str], bool]:
    """Words of one token each after a space, and True; or plain words and False if there are too few."""
    gate = asyncio.Semaphore(MAX_PARALLEL_CALLS)

    async def is_one_token(word: str) -> bool:
        async with gate:
            return len(await client.tokenize(f" {word}")) == 1

    found = await asyncio.gather(*(is_one_token(word) for word in COMMON_WORDS))
    single = [word for word, is_single in zip(COMMON_WORDS, found, strict=True) if is_single]
    return (single, True) if len(single) >= MIN_WORDS else (list(COMMON_WORDS), False)
