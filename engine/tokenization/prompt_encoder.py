"""Tokenizes texts, with a cache so that only new text is tokenized. It knows one tokenizer, and no
conversations.

A tokenizer of the tokenizers library first splits a text at its special tokens and tokenizes the text between
them independently. So pieces, each from one special token to the next, are cached with their tokens: a
conversation that continues, or branches, reuses the pieces that it shares. A long piece is split again where
that is safe (``engine.tokenization.text_cuts``), and only a few pieces are tokenized at a time, since that
takes hundreds of bytes of memory per character.
"""

from __future__ import annotations

import json
import re
import string
import struct
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from sys import getsizeof
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING, Any

import msgspec

from engine.tokenization.text_cuts import PART_CHARS, TextCuts

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as BackendTokenizer

MAX_REMEMBERED_BYTES = 64 * 2**20
"""Enough for about forty conversations of 100,000 tokens, at 15 bytes per token: four characters, a reference
and the msgpack for the core."""
MAX_REMEMBERED_CHARS = 2**20
"""Maximum length of a text that is cached: a longer one would evict many conversations."""
GROUP_CHARS = 4 * PART_CHARS
"""Number of characters tokenized at a time, for 40 MB of memory."""
MAX_GROUPS = 2
"""Maximum number of groups longer than a part that are tokenized at once; shorter texts never wait for
them."""
MAX_CUTS = 256
"""Maximum number of special tokens that texts are split at; some tokenizers reserve thousands."""

_PIECE_BYTES = 256
"""Overhead of a cached piece besides text and tokens: the record, its key, its entry in the dictionary."""
_EMPTY = msgspec.msgpack.encode([])
_FIRM_EDGES = frozenset(string.punctuation) - {"_"}
"""Characters that are neither a space, which a neighbor may absorb, nor part of a word, which must not border
on one."""
_LOCAL_KINDS = frozenset(
    (
        *("Sequence", "BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled"),
        *("Prepend", "Replace", "Strip", "StripAccents", "BertPreTokenizer", "ByteLevel", "Digits"),
        *("CharDelimiterSplit", "FixedLength", "Metaspace", "Punctuation", "Split", "UnicodeScripts"),
        *("Whitespace", "WhitespaceSplit"),
    )
)
"""Normalizers and pre-tokenizers known to depend only on the piece, and on whether it is the text's first
(``Metaspace``); any other piece begins with its special token here, too."""


class EncodedTokens(list[int]):
    """The immutable tokens of a text from a tokenizer: ``highest`` is the largest of them,
    ``as_msgpack`` the list's msgpack."""

    __slots__ = ("as_msgpack", "highest")

    def __init__(self, highest: int = 0, as_msgpack: bytes = _EMPTY) -> None:
        super().__init__()
        self.highest = highest
        self.as_msgpack = as_msgpack


class ContinuedTokens(list[int]):
    """The immutable tokens of a prompt that begins with all tokens of an earlier turn."""

    __slots__ = ("highest", "num_known", "turn_id")

    def __init__(self, known: Sequence[int], new: Sequence[int], highest: int, turn_id: str) -> None:
        """``known`` are the tokens of the turn ``turn_id``, which is its caller's id; ``highest`` is an upper
        bound of them."""
        super().__init__(known)
        self += new
        self.num_known = len(known)
        self.highest = max((highest, *new))
        self.turn_id = turn_id


def extreme_tokens(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Returns tokens of which at least one is outside a vocabulary if any token of the text is."""
    if isinstance(token_ids, EncodedTokens | ContinuedTokens):  # reading 100,000 takes a millisecond
        return (token_ids.highest,)
    return (min(token_ids), max(token_ids))


@dataclass(frozen=True, slots=True)
class _Piece:
    token_ids: list[int]
    highest: int
    written: bytes
    """The msgpack of the tokens, concatenated."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class EncoderStatistics:
    """Memory and misses of the cache."""

    num_bytes: int
    num_tokenized_characters: int
    """Characters of encoded texts that were not cached and had to be tokenized."""


class PromptEncoder:
    """Encodes like the tokenizer, without adding special tokens. Thread safe."""

    def __init__(
        self, backend: BackendTokenizer, cuts: Sequence[str], max_bytes: int = MAX_REMEMBERED_BYTES
    ) -> None:
        """``cuts``: special tokens that are matched wherever their text occurs."""
        self._backend = backend
        self._cut = re.compile(_any_of(cuts))
        self._longest_cut = max(map(len, cuts))
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._num_tokenized_characters = 0
        self._pieces: OrderedDict[tuple[str | None, str], _Piece] = OrderedDict()
        """Cached pieces by owner and text, so that timing does not reveal what other owners have sent."""
        self._lock = Lock()
        self._groups = BoundedSemaphore(MAX_GROUPS)
        self._integers: dict[int, int] = {}
        """One int object per token id, shared by all pieces and prompts."""

    @classmethod
    def of(cls, backend: BackendTokenizer, max_bytes: int = MAX_REMEMBERED_BYTES) -> PromptEncoder | None:
        """Returns the encoder; None unless the pieces of a text certainly have the tokens of the whole."""
        if not _is_local(backend):
            return None
        cuts = cut_tokens(backend.get_added_tokens_decoder())
        encoder = cls(backend, cuts, max_bytes) if cuts else None
        return encoder if encoder is not None and encoder._agrees_on(_probe(cuts)) else None

    def encode(self, text: str, owner: str | None = None) -> EncodedTokens:
        """Returns the text's tokens, exactly those of tokenizing it at once; cached pieces belong to its
        owner."""
        self._take_texts_as_they_are()
        texts = list(self._split(text))
        if len(texts) == 1:
            return _joined([self._tokenize(texts)[text]])
        return _joined(self._pieces_of(texts, owner, remembers=len(text) <= MAX_REMEMBERED_CHARS))

    def cuts_at(self, token_text: str) -> bool:
        """Whether texts are split wherever this token's text occurs, so that no text before it affects the
        tokens after it."""
        return self._cut.fullmatch(token_text) is not None

    def steps(self, text: str, owner: str | None = None) -> Iterator[list[int]]:
        """Yields the same tokens in groups, in memory that does not grow with the text."""
        self._take_texts_as_they_are()
        for texts in _in_groups(self._split(text)):
            pieces = self._pieces_of(texts, owner, remembers=len(text) <= MAX_REMEMBERED_CHARS)
            yield [token for piece in pieces for token in piece.token_ids]

    def _pieces_of(self, texts: Sequence[str], owner: str | None, *, remembers: bool) -> list[_Piece]:
        known = self._recall(texts, owner)
        new = self._tokenize([text for text, piece in zip(texts, known, strict=True) if piece is None])
        if remembers:
            self._remember(new, owner)
        return [piece or new[text] for text, piece in zip(texts, known, strict=True)]

    def statistics(self) -> EncoderStatistics:
        """Counts since the start."""
        return EncoderStatistics(self._num_bytes, self._num_tokenized_characters)

    @cached_property
    def _cuts(self) -> TextCuts:
        return TextCuts.of(self._backend)

    def _split(self, text: str) -> Iterator[str]:
        start = 0
        for end in (*self._starts(text), len(text)):
            if end > start or not text:
                piece = text[start:end]
                yield from (piece,) if len(piece) <= PART_CHARS else self._cuts.parts(piece)
            start = end

    def _starts(self, text: str) -> Iterator[int]:
        """Yields positions of special tokens. Searches window by window, since the search blocks other
        threads."""
        at = 0
        while at < len(text):
            found = self._cut.search(text, at, at + MAX_REMEMBERED_CHARS)
            if found is not None:
                yield found.start()
                at = found.end()
            else:
                at += MAX_REMEMBERED_CHARS - self._longest_cut

    def _recall(self, texts: Sequence[str], owner: str | None) -> list[_Piece | None]:
        names = [(owner, text) for text in texts]
        with self._lock:
            found = [self._pieces.get(name) for name in names]
            for name, piece in zip(names, found, strict=True):
                if piece is not None:
                    self._pieces.move_to_end(name)
        return found

    def _tokenize(self, texts: Iterable[str]) -> dict[str, _Piece]:
        """Tokenizes without the interpreter lock: other threads continue."""
        new: dict[str, _Piece] = {}
        for group in _in_groups(dict.fromkeys(texts)):
            num_characters = sum(map(len, group))
            self._num_tokenized_characters += num_characters
            with self._groups if num_characters > PART_CHARS else nullcontext():
                encodings = self._backend.encode_batch_fast(group, add_special_tokens=False)
            new |= {text: self._piece(text, each.ids) for text, each in zip(group, encodings, strict=True)}
            del encodings
        return new

    def _piece(self, text: str, token_ids: list[int]) -> _Piece:
        token_ids = list(map(self._integers.setdefault, token_ids, token_ids))
        written = msgspec.msgpack.encode(token_ids)[len(_list_header(len(token_ids))) :]
        num_bytes = getsizeof(text) + getsizeof(token_ids) + getsizeof(written) + _PIECE_BYTES
        return _Piece(token_ids, max(token_ids, default=0), written, num_bytes)

    def _remember(self, new: dict[str, _Piece], owner: str | None) -> None:
        """Caches the new pieces and evicts the least recently used."""
        with self._lock:
            for text, piece in new.items():
                if (owner, text) not in self._pieces:
                    self._pieces[owner, text] = piece
                    self._num_bytes += piece.num_bytes
            while self._num_bytes > self._max_bytes:
                _, forgotten = self._pieces.popitem(last=False)
                self._num_bytes -= forgotten.num_bytes

    def _take_texts_as_they_are(self) -> None:
        """Turns off truncation, padding and the treatment of special tokens as text. The tokenizer keeps such
        settings, and other users may have turned them on."""
        if self._backend.truncation is not None:
            self._backend.no_truncation()
        if self._backend.padding is not None:
            self._backend.no_padding()
        if self._backend.encode_special_tokens:
            self._backend.encode_special_tokens = False

    def _agrees_on(self, text: str) -> bool:
        """Whether the installed library tokenizes this text as assumed here."""
        whole = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return whole == self.encode(text)


def _in_groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yields groups of pieces with a bounded total length."""
    group: list[str] = []
    num_characters = 0
    for text in texts:
        if group and num_characters + len(text) > GROUP_CHARS:
            yield group
            group = []
            num_characters = 0
        group.append(text)
        num_characters += len(text)
    if group:
        yield group


def _joined(pieces: Sequence[_Piece]) -> EncodedTokens:
    header = _list_header(sum(len(piece.token_ids) for piece in pieces))
    tokens = EncodedTokens(
        max(piece.highest for piece in pieces), b"".join((header, *[piece.written for piece in pieces]))
    )
    for piece in pieces:
        tokens += piece.token_ids
    return tokens


def _list_header(num_items: int) -> bytes:
    """The msgpack header of a list (its specification, "array format family")."""
    if num_items < 16:
        return bytes((0x90 | num_items,))
    return struct.pack(">BH", 0xDC, num_items) if num_items < 2**16 else struct.pack(">BI", 0xDD, num_items)


# ---- where a text may be split ----


def cut_tokens(added: dict[int, AddedToken]) -> list[str]:
    """Added tokens, at most MAX_CUTS, that are matched wherever their text occurs, whatever surrounds it.

    They are matched before the text is normalized, absorb no adjacent space, and share no character with
    another token that is matched then. Special tokens come first, then the oldest.
    """
    literal = {token.content for token in added.values() if not token.normalized}
    firm = [
        (not token.special, token_id, token.content)
        for token_id, token in added.items()
        if token.content in literal
        and not (token.normalized or token.single_word or token.lstrip or token.rstrip)
        and {token.content[0], token.content[-1]} <= _FIRM_EDGES
    ]
    candidates = [content for _, _, content in sorted(firm)[:MAX_CUTS]]
    return _without_overlaps(candidates, literal)


def _without_overlaps(candidates: Sequence[str], literal: Collection[str]) -> list[str]:
    """Returns the tokens that cannot overlap in a text with another of ``literal``, or with themselves."""
    all_of_them = "\0".join(literal)
    heads = {text[:length] for text in literal for length in range(1, len(text) + 1)}
    tails = {text[start:] for text in literal for start in range(1, len(text))}

    def is_apart(text: str) -> bool:
        inner = range(1, len(text))
        return (
            all_of_them.count(text) == 1
            and not any(text[:end] in tails or text[:end] in literal for end in inner)
            and not any(text[start:] in heads for start in inner)
            and not any(text[start:end] in literal for start in inner for end in range(start + 1, len(text)))
        )

    return [text for text in candidates if is_apart(text)]


def _any_of(texts: Collection[str]) -> str:
    """Returns a pattern for these texts, none of which is a prefix of another, that reads each character
    once."""
    if list(texts) == [""]:
        return ""
    branches = [
        re.escape(first) + _any_of([text[1:] for text in group])
        for first, group in groupby(sorted(texts), itemgetter(0))
    ]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _is_local(backend: BackendTokenizer) -> bool:
    """Whether the tokenizer treats a text piece by piece, and the same each time."""
    if getattr(backend.model, "dropout", None) or getattr(backend.model, "alpha", None):
        return False
    steps = [step for step in (backend.normalizer, backend.pre_tokenizer) if step is not None]
    try:
        return all(kind in _LOCAL_KINDS for step in steps for kind in _kinds(json.loads(step.__getstate__())))
    except Exception:  # a step written in Python is opaque, and may read anything
        return False


def _kinds(step: dict[str, Any]) -> Iterable[str]:
    yield step["type"]
    for inner in (*step.get("normalizers", ()), *step.get("pretokenizers", ())):
        yield from _kinds(inner)


def _probe(cuts: Sequence[str]) -> str:
    """A text with each of these tokens between words, spaces, line ends and other such tokens."""
    return "".join(f"One two {cut} three{cut}\n four  {cut}{cut}five's\n\n" for cut in cuts)
