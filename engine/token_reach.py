"""How few tokens a text can have, told from its length: what cannot fit need not be tokenised.

Knows one tokenizer. Where a token may stand for any amount of text, or text is dropped, nothing is known.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BackendTokenizer

_MAX_CHARACTER_BYTES = 4
_SPACE_MARK = "▁"
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass(frozen=True, slots=True)
class TokenReach:
    """The most that one token stands for."""

    longest: int
    """In bytes of UTF-8 where tokens are made of bytes, else in characters."""
    in_bytes: bool
    composes: bool
    """Whether the text is brought to NFC first, which may make it shorter."""

    @classmethod
    def of(cls, backend: BackendTokenizer) -> TokenReach | None:
        """None where it is not certain that all of a text is in its tokens, each of a bounded part."""
        from tokenizers.models import BPE

        added = backend.get_added_tokens_decoder().values()
        try:
            steps = [kind for step in (backend.normalizer, backend.pre_tokenizer) for kind in _steps(step)]
        except Exception:  # a step written in Python has no state, and may drop anything
            return None
        if not all(map(_keeps_text, steps)) or any(token.lstrip or token.rstrip for token in added):
            return None
        kinds = {step["type"] for step in steps}
        vocabulary = backend.get_vocab(with_added_tokens=False)
        in_bytes = "ByteLevel" in kinds
        if not isinstance(backend.model, BPE) or not _knows_all_text(backend, vocabulary, in_bytes):
            return None
        longest = max(*map(len, vocabulary), *(len(token.content.encode()) for token in added), 1)
        return cls(longest, in_bytes, "NFC" in kinds)

    def exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether the text certainly has more tokens than so many."""
        room = num_tokens * self.longest
        if len(text) * _MAX_CHARACTER_BYTES <= room:  # nearly always
            return False
        return self._measure(text) > room

    def fewest_tokens(self, text: str) -> int:
        """The text has so many tokens, or more."""
        return -(-self._measure(text) // self.longest)

    def _measure(self, text: str) -> int:
        text = normalize("NFC", text) if self.composes else text
        return len(text.encode()) if self.in_bytes else len(text)


def _steps(step: Any) -> list[dict[str, Any]]:
    """A normalizer or a pre-tokenizer as all that it does in turn."""
    return [] if step is None else _flat(json.loads(step.__getstate__()))


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    inner = (*step.get("normalizers", ()), *step.get("pretokenizers", ()))
    return [one for each in inner for one in _flat(each)]


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether each character that goes in comes out, as itself or as more."""
    match step["type"]:
        case "NFC" | "Prepend" | "ByteLevel" | "Metaspace" | "Digits":
            return True
        case "Split" | "Punctuation":
            return bool(step["behavior"] != "Removed")
        case "Replace":
            return bool(step["pattern"] == {"String": " "} and step["content"] == _SPACE_MARK)
    return False


def _knows_all_text(backend: BackendTokenizer, vocabulary: dict[str, int], in_bytes: bool) -> bool:
    """Whether no part of a text is unknown: those are dropped, or many become one token."""
    from tokenizers.pre_tokenizers import ByteLevel

    if in_bytes:
        return vocabulary.keys() >= set(ByteLevel.alphabet())
    return bool(backend.model.byte_fallback) and vocabulary.keys() >= set(_BYTE_TOKENS)
