"""Lower bounds of a text's tokens by its length: a prompt that cannot fit need not be tokenized.

It knows one tokenizer. If a token may represent any amount of text, or text is dropped, there is no bound.
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
class TokenBounds:
    """The maximum length of the text of one token."""

    longest: int
    """The length in UTF-8 bytes for byte-level tokenizers, else in characters."""
    in_bytes: bool
    composes: bool
    """Whether the text is normalized to NFC first, which may shorten it."""

    @classmethod
    def of(cls, backend: BackendTokenizer) -> TokenBounds | None:
        """Returns the bounds; None unless all of a text is certainly in its tokens, each of bounded
        length."""
        from tokenizers.models import BPE

        added = backend.get_added_tokens_decoder().values()
        try:
            steps = [kind for step in (backend.normalizer, backend.pre_tokenizer) for kind in _steps(step)]
        except Exception:  # a step written in Python is opaque, and may drop anything
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
        """Whether the text certainly has more tokens than the limit."""
        most_bytes = num_tokens * self.longest
        if len(text) * _MAX_CHARACTER_BYTES <= most_bytes:  # the usual case
            return False
        return self._measure(text) > most_bytes

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the text's tokens."""
        return -(-self._measure(text) // self.longest)

    def _measure(self, text: str) -> int:
        text = normalize("NFC", text) if self.composes else text
        return len(text.encode()) if self.in_bytes else len(text)


def _steps(step: Any) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or a pre-tokenizer, in order."""
    return [] if step is None else _flat(json.loads(step.__getstate__()))


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    inner = (*step.get("normalizers", ()), *step.get("pretokenizers", ()))
    return [one for each in inner for one in _flat(each)]


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether each input character is kept, as one character or more."""
    match step["type"]:
        case "NFC" | "Prepend" | "ByteLevel" | "Metaspace" | "Digits":
            return True
        case "Split" | "Punctuation":
            return bool(step["behavior"] != "Removed")
        case "Replace":
            return bool(step["pattern"] == {"String": " "} and step["content"] == _SPACE_MARK)
    return False


def _knows_all_text(backend: BackendTokenizer, vocabulary: dict[str, int], in_bytes: bool) -> bool:
    """Whether the tokenizer knows all text: unknown text is dropped, or merged into one token."""
    from tokenizers.pre_tokenizers import ByteLevel

    if in_bytes:
        return vocabulary.keys() >= set(ByteLevel.alphabet())
    return bool(backend.model.byte_fallback) and vocabulary.keys() >= set(_BYTE_TOKENS)
