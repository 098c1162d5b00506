"""Signatures of thinking blocks: clients send them back, and the text may be read from them.

A signature identifies its text. For a client that requested thinking without its text (``display: omitted``),
it also holds the text, so that the next turn's prompt includes it.
"""

from __future__ import annotations

import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b

_PREFIX = "ctm1"
MAX_THINKING_CHARS = 4 * 2**20
"""Maximum length of a text that is read from a signature."""


def sign(thinking: str, *, with_text: bool) -> str:
    """The signature of a block; ``with_text`` includes the compressed text."""
    digest = _digest(thinking)
    if not with_text:
        return f"{_PREFIX}.{digest}"
    return f"{_PREFIX}.{digest}.{urlsafe_b64encode(zlib.compress(thinking.encode())).decode()}"


def text_of(thinking: str, signature: object) -> str:
    """A block's text as generated: its own text, or the one in its signature."""
    if thinking or not isinstance(signature, str):
        return thinking
    prefix, _, rest = signature.partition(".")
    digest, _, packed = rest.partition(".")
    if prefix != _PREFIX or not packed:
        return thinking
    text = _unpacked(packed)
    return text if text is not None and _digest(text) == digest else thinking


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16, person=b"thinking").hexdigest()


def _unpacked(packed: str) -> str | None:
    unzip = zlib.decompressobj()
    try:
        return unzip.decompress(urlsafe_b64decode(packed), MAX_THINKING_CHARS).decode()
    except (ValueError, zlib.error):
        return None
