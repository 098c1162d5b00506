"""Fingerprints of prompts: what is kept of one, so that a later prompt can be compared with it.

No text and no token is kept, only hashes: of each part of the request, and of the prompt's tokens
up to every ``STRIDE``-th.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Literal, get_args

import msgspec

from engine.api.conversation import Conversation

Part = Literal["model", "tools", "system", "reasoning", "messages"]
PARTS: tuple[Part, ...] = get_args(Part)
"""Parts of a request that determine its prompt, the one to blame first first."""

STRIDE = 64
"""Where two prompts diverge is known to this many tokens."""
HASH_BYTES = 8


class Fingerprint(msgspec.Struct, array_like=True, frozen=True):
    """What is kept of one prompt."""

    num_tokens: int
    parts: dict[str, bytes]
    """A hash of each part but the messages."""
    messages: list[bytes]
    """A hash of each message."""
    marks: list[bytes]
    """Hashes of the prompt's first ``STRIDE``, ``2 * STRIDE``, ... tokens, then of all."""

    def changed(self, now: Fingerprint) -> Part | None:
        """The first part that another request has changed, not only appended to; None if none."""
        for part in PARTS[:-1]:
            if self.parts[part] != now.parts[part]:
                return part
        return None if now.messages[: len(self.messages)] == self.messages else "messages"

    def num_shared(self, token_ids: Sequence[int]) -> int:
        """How many of this prompt's first tokens another prompt begins with: all of them, or a
        multiple of ``STRIDE``."""
        num_compared = self.num_tokens
        if len(token_ids) < num_compared:  # the mark of a stride that is cut equals none of this prompt's
            num_compared = len(token_ids) // STRIDE * STRIDE
        pairs = zip(self.marks, _marks(token_ids[:num_compared]), strict=False)
        num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return min(num_equal * STRIDE, self.num_tokens)


def fingerprint(conversation: Conversation, model_name: str, token_ids: Sequence[int]) -> Fingerprint:
    """The fingerprint of a conversation that was rendered as ``token_ids``."""
    system = [message for message in conversation.messages if message.get("role") in ("system", "developer")]
    pictures = conversation.pictures
    read = _as_it_is if pictures is None else pictures.by_content
    adapter = conversation.context.adapter
    adapter_key = None if adapter is None else adapter.key
    return Fingerprint(
        num_tokens=len(token_ids),
        parts={
            "model": _hash([model_name, adapter_key, conversation.chat_template]),
            "tools": _hash(conversation.tools),
            "system": _hash(system),
            "reasoning": _hash(conversation.chat_template_kwargs),
        },
        messages=[_hash(message, read) for message in conversation.messages],
        marks=list(_marks(token_ids)),
    )


def _marks(token_ids: Sequence[int]) -> Iterator[bytes]:
    tokens, so_far = array("i", token_ids), blake2b(digest_size=HASH_BYTES)
    for start in range(0, len(tokens), STRIDE):
        so_far.update(tokens[start : start + STRIDE].tobytes())
        yield so_far.digest()


def _as_it_is(data: bytes) -> bytes:
    return data


def _hash(value: Any, read: Callable[[bytes], bytes] = _as_it_is) -> bytes:
    """Of a client's JSON, whatever it holds, after ``read``."""
    try:
        data = msgspec.json.encode(value, order="deterministic")
    except (TypeError, ValueError, OverflowError):
        data = repr(value).encode(errors="replace")
    return blake2b(read(data), digest_size=HASH_BYTES).digest()
