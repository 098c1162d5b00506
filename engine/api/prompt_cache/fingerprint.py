"""Fingerprints of prompts, which allow comparing a later prompt with an earlier one.

No text and no token is kept, only hashes: of each part of the request, and of the prompt's tokens up to every
``STRIDE``-th.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Literal, get_args

import msgspec

from engine.api.turn.conversation import Conversation

Part = Literal["model", "tools", "system", "reasoning", "messages"]
PARTS: tuple[Part, ...] = get_args(Part)
"""Parts of a request that determine its prompt, in the order in which they are blamed."""

STRIDE = 64
"""The precision, in tokens, of the point where two prompts diverge."""
HASH_BYTES = 8


class Fingerprint(msgspec.Struct, array_like=True, frozen=True):
    """The stored hashes of one prompt."""

    num_tokens: int
    parts: dict[str, bytes]
    """A hash of each part except the messages."""
    messages: list[bytes]
    """A hash of each message."""
    marks: list[bytes]
    """Hashes of the prompt's first ``STRIDE``, ``2 * STRIDE``, ... tokens, then of all."""

    def changed(self, now: Fingerprint) -> Part | None:
        """The first part that another request has changed rather than appended to; None if there is none."""
        for part in PARTS[:-1]:
            if self.parts[part] != now.parts[part]:
                return part
        return None if now.messages[: len(self.messages)] == self.messages else "messages"

    def num_shared(self, token_ids: Sequence[int]) -> int:
        """The number of this prompt's first tokens that another prompt shares: all of them, or a multiple of
        ``STRIDE``."""
        num_compared = self.num_tokens
        if len(token_ids) < num_compared:  # the hash of a partial stride equals none of this prompt's
            num_compared = len(token_ids) // STRIDE * STRIDE
        others = _marks(array("i", token_ids[:num_compared]), blake2b(digest_size=HASH_BYTES))
        pairs = zip(self.marks, others, strict=False)
        num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return min(num_equal * STRIDE, self.num_tokens)


@dataclass(frozen=True, slots=True)
class PromptPrint:
    """A fingerprint that can be extended to that of a longer prompt."""

    fingerprint: Fingerprint
    _full_marks: list[bytes]
    _so_far: blake2b
    """The hash of the tokens up to the last full stride."""

    @classmethod
    def of(cls, conversation: Conversation, model_name: str, token_ids: Sequence[int]) -> PromptPrint:
        """Makes the fingerprint of a conversation that was rendered as ``token_ids``."""
        continued = conversation.continued
        before = None if continued is None else continued.fingerprint
        read = _as_it_is if conversation.media is None else conversation.media.by_content
        messages = [hash_of(message, read) for message in conversation.messages]
        full_marks: list[bytes] = []
        so_far = blake2b(digest_size=HASH_BYTES)
        if before is not None:
            parts = before.fingerprint.parts
            messages = before.fingerprint.messages + messages
            full_marks = list(before._full_marks)
            so_far = before._so_far.copy()
        else:
            parts = _parts(conversation, model_name)
        num_marked = len(full_marks) * STRIDE
        tokens = array("i", token_ids[num_marked:])
        rest = len(tokens) % STRIDE
        full_marks += _marks(tokens[: len(tokens) - rest], so_far)
        marks = [*full_marks, *_marks(tokens[len(tokens) - rest :], so_far.copy())]
        return cls(Fingerprint(len(token_ids), parts, messages, marks), full_marks, so_far)


def _parts(conversation: Conversation, model_name: str) -> dict[str, bytes]:
    system = [message for message in conversation.messages if message.get("role") in ("system", "developer")]
    adapter = conversation.context.adapter
    adapter_key = None if adapter is None else adapter.key
    return {
        "model": hash_of([model_name, adapter_key, conversation.chat_template]),
        "tools": hash_of(conversation.tools),
        "system": hash_of(system),
        "reasoning": hash_of(conversation.chat_template_kwargs),
    }


def _marks(tokens: array[int], so_far: blake2b) -> Iterator[bytes]:
    """Adds the tokens to a hash, and yields it after each stride."""
    for start in range(0, len(tokens), STRIDE):
        so_far.update(tokens[start : start + STRIDE].tobytes())
        yield so_far.digest()


def _as_it_is(data: bytes) -> bytes:
    return data


def hash_of(value: Any, read: Callable[[bytes], bytes] = _as_it_is) -> bytes:
    """A hash of a client's JSON, whatever it contains, after ``read``."""
    try:
        data = msgspec.json.encode(value, order="deterministic")
    except (TypeError, ValueError, OverflowError):
        data = repr(value).encode(errors="replace")
    return blake2b(read(data), digest_size=HASH_BYTES).digest()
