"""Finds where a text may be split so that its parts have exactly the tokens of the whole.

A tokenizer takes hundreds of bytes of memory per character of one input. So long texts are tokenized in
parts, split where a letter ends a word in the tokenizer's sense. The tokenizer's own steps prove that this is
safe; if they cannot, a text is one part of bounded length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.errors import RequestError
from engine.tokenization.split_pattern import PatternError, SplitPattern

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as BackendTokenizer

PART_CHARS = 32 * 1024
"""A part ends at the first safe split after this many characters."""
MAX_PART_CHARS = 2**20
"""Maximum length of a part without a safe split: 300 MB while it is tokenized."""

_DIGITS = "0123456789"
_LETTERS = "".join(
    chr(code)
    for first, last in (
        *(("A", "Z"), ("a", "z"), ("À", "Ö"), ("Ø", "ö"), ("ø", "ɏ"), ("Α", "Ρ"), ("Σ", "Ω"), ("α", "ω")),
        *(
            ("А", "я"),
            ("א", "ת"),
            ("ء", "غ"),
            ("ف", "ي"),
            ("ぁ", "ゖ"),
            ("ァ", "ヺ"),
            ("一", "龥"),
            ("가", "힣"),
        ),
    )
    for code in range(ord(first), ord(last) + 1)
)
"""Letters of scripts whose properties are the same in all versions of Unicode."""
_SPACES = " \n\t\r"
_MARKS = '.,;:!?()[]{}<>"/\\|=+*&^%$#@~`-，。、！？：；（）「」'
"""Marks that never change the letter before them, as an apostrophe would."""
_CHOICES = (
    (_LETTERS + _DIGITS, _SPACES + _MARKS),
    (_LETTERS, _SPACES + _MARKS),
    (_LETTERS, _SPACES),
    (_LETTERS, " "),
)
"""Characters before and after a split; the first proved pair is used."""
_SPACE_MARK = "▁"
_GPT2_PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of the step ByteLevel
)


@dataclass(frozen=True, slots=True)
class TextCuts:
    """How texts of one tokenizer are split."""

    before: re.Pattern[str] | None = None
    """A pattern that ends at a safe split; None if nothing is proved."""
    inside: tuple[tuple[str, int], ...] = ()
    """Added tokens, which are never split, with the offset of such a position in them."""
    drops_space: bool = False
    """Whether the tokenizer adds a space before each part, so that the part's own space is dropped."""

    @classmethod
    def of(cls, backend: BackendTokenizer) -> TextCuts:
        """Returns the splits that can be proved safe for this tokenizer."""
        try:
            normalizers = _steps(backend.normalizer)
            splits = _steps(backend.pre_tokenizer)
        except Exception:  # a step written in Python is opaque, and may read anything
            return cls()
        if getattr(backend.model, "dropout", None) or not _is_bpe(backend):
            return cls()
        cuts = _word_cuts(normalizers, splits) or _space_cuts(backend, normalizers, splits)
        return cls() if cuts is None else cuts._beside(backend.get_added_tokens_decoder().values())

    def _beside(self, added: Collection[AddedToken]) -> TextCuts:
        """Returns the splits restricted to what these added tokens allow."""
        assert self.before is not None
        inside = [(token, found.end()) for token in added for found in self.before.finditer(token.content)]
        words = _LETTERS + _DIGITS
        if (
            any(token.single_word or (token.rstrip and token.content[-1:] in words) for token in added)
            or any(token.normalized and not token.content.isascii() for token, _ in inside)
            or (self.drops_space and any(token.content[:1] in words for token in added))
        ):
            return TextCuts()
        return replace(self, inside=tuple((token.content, at) for token, at in inside))

    def parts(self, text: str, part_chars: int = PART_CHARS) -> Iterator[str]:
        """Yields the text's parts, which are tokenized separately; RequestError if one would be too long."""
        start = 0
        while len(text) - start > part_chars:
            end = self._cut_behind(text, start + part_chars, start + MAX_PART_CHARS)
            if end is None and len(text) - start > MAX_PART_CHARS:
                raise too_long_to_tokenize()
            if end is None:
                break
            yield text[start:end]
            start = end + self.drops_space
        yield text[start:]

    def _cut_behind(self, text: str, first: int, last: int) -> int | None:
        if self.before is None:
            return None
        for found in self.before.finditer(text, first, min(last, len(text))):
            if not any(text.startswith(token, max(0, found.end() - at)) for token, at in self.inside):
                return found.end()
        return None


def too_long_to_tokenize() -> RequestError:
    """Returns the error for a long text without a safe split."""
    return RequestError(
        f"The text is too long to be tokenized: it has more than {MAX_PART_CHARS} characters without a place "
        "where it could be split for this model's tokenizer, such as a space after a letter.",
        "prompt",
    )


def _word_cuts(normalizers: list[dict[str, Any]], splits: list[dict[str, Any]]) -> TextCuts | None:
    """Splits for a tokenizer that first separates texts by patterns."""
    if any(step["type"] != "NFC" for step in normalizers):
        return None
    try:
        patterns = [pattern for step in splits if (pattern := _pattern_of(step)) is not None]
    except PatternError:
        return None
    for left, right in _CHOICES:
        if not any(pattern.has_pair(left, right) for pattern in patterns) and any(
            pattern.takes_each(left) for pattern in patterns
        ):
            return TextCuts(re.compile(f"[{re.escape(left)}](?=[{re.escape(right)}])"))
    return None


def _pattern_of(step: dict[str, Any]) -> SplitPattern | None:
    """The pattern of the step; None if it only splits at single characters."""
    match step:
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
            return SplitPattern(pattern)
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True}:
            return SplitPattern(pattern)
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
            return SplitPattern(_GPT2_PATTERN) if use_regex else None
        case {"type": "Digits"} | {"type": "Punctuation", "behavior": "Isolated"}:
            return None
    raise PatternError(step["type"])


def _space_cuts(
    backend: BackendTokenizer, normalizers: list[dict[str, Any]], splits: list[dict[str, Any]]
) -> TextCuts | None:
    """Splits for a tokenizer that writes spaces as marks and merges everything between special tokens: if no
    token has a mark after a letter, no token spans the two."""
    prepends = bool(normalizers) and normalizers[0] == {"type": "Prepend", "prepend": _SPACE_MARK}
    rest = normalizers[1:] if prepends else normalizers
    replaces = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_MARK}]
    is_metaspace = [step["type"] for step in splits] == ["Metaspace"] and splits[0][
        "replacement"
    ] == _SPACE_MARK
    is_plain = not splits or (splits[0]["type"] == "Split" and splits[0]["pattern"] == {"String": " "})
    if not ((rest == replaces and is_plain and len(splits) < 2) or (not normalizers and is_metaspace)):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if not _knows_all_characters(backend, vocabulary):
        return None
    left = re.escape(_LETTERS + _DIGITS)
    across = re.compile(f"[{left}]{_SPACE_MARK}")
    if any(_SPACE_MARK in token[1:] and across.search(token) for token in vocabulary):
        return None
    return TextCuts(re.compile(f"[{left}](?= [{left}])"), drops_space=prepends)


def _knows_all_characters(backend: BackendTokenizer, vocabulary: Collection[str]) -> bool:
    """Whether no character is unknown: several unknown ones may become one token."""
    return bool(backend.model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _is_bpe(backend: BackendTokenizer) -> bool:
    from tokenizers.models import BPE

    return isinstance(backend.model, BPE)


def _steps(step: Any) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or a pre-tokenizer, in order."""
    return [] if step is None else list(_flat(json.loads(step.__getstate__())))


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
    for inner in (*step.get("normalizers", ()), *step.get("pretokenizers", ())):
        yield from _flat(inner)
