"""What is kept of responses between turns, within bounds: the least recently used make room for newer ones.

The bounds are those of responses that have ended. One that is still being made never makes room: it comes on
top, and how many there are is bounded by ``max_background_responses`` of each process.

``MemoryStore`` is for a server of one process; ``SqliteStore`` is one file for several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine.api.errors import NotFoundError
from engine.api.openai_responses.input_items import Item
from engine.api.openai_responses.items import (
    ENDED,
    ConversationId,
    OutputItem,
    Response,
    ResponseError,
    ResponseStatus,
)

RENEWED_FOR_S = 15.0
"""A turn whose process has not told for so long that it still makes it is lost: its response has failed, and
its conversation is free."""


class StoredResponse(msgspec.Struct, kw_only=True, frozen=True):
    """A response with what it answered. The turns before are kept by themselves."""

    response: Response
    input: list[Item]
    """Of this turn alone, each with an id."""
    previous_id: str | None = None
    """The response before it, also where a conversation was named instead."""
    job_id: str | None = None
    """As the client said it, or as it was inferred: the next turn belongs to it too."""


class PastResponse(msgspec.Struct, kw_only=True, frozen=True):
    """What later turns need of a response; a stored one is read so without its tools and instructions."""

    id: str
    status: ResponseStatus
    created_at: int
    conversation: ConversationId | None
    output: list[OutputItem]
    metadata: dict[str, Any]


class PastTurn(msgspec.Struct, kw_only=True, frozen=True):
    """What later turns need of a stored response."""

    response: PastResponse
    input: list[Item]
    previous_id: str | None
    job_id: str | None


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much is kept of responses that have ended, over all processes."""

    max_responses: int = 10_000
    max_bytes: int = 256 * 2**20


class ResponseNotStoredError(NotFoundError):
    """A request names a response or a conversation that is not stored, or no longer."""

    def __init__(self, what: str, limits: StoreLimits, field: str | None = None) -> None:
        super().__init__(
            f"{what} is not stored: it was never kept, was deleted, or made room for newer ones. This server "
            f"keeps the {limits.max_responses} responses used last, in at most {limits.max_bytes} bytes.",
            field,
        )


class ResponseStore(Protocol):
    """Where responses are kept. Each use of a response makes it the most recently used.

    A store is one owner's view of what all of them have: every id is looked for, and every conversation
    locked, among that owner's own.
    """

    limits: StoreLimits

    def of(self, owner: str | None) -> ResponseStore:
        """The same store as another owner sees it."""

    async def put(self, stored: StoredResponse) -> None:
        """Keep it, in place of an earlier state of it; if it ended, it is its conversation's newest, and the
        conversation is free for the next turn."""

    async def update(self, stored: StoredResponse) -> bool:
        """Keep a later state of it; False, and nothing is kept, if it was deleted or has made room."""

    async def get(self, response_id: str) -> StoredResponse | None:
        """None if it is not kept (any more)."""

    async def chain(self, response_id: str, field: str) -> list[PastTurn]:
        """It and all before it, oldest first; ResponseNotStoredError, blaming ``field``, if one is gone."""

    async def delete(self, response_id: str) -> bool:
        """Forget it; False if there is nothing to forget."""

    async def newest(self, conversation_id: str) -> str | None:
        """The response that a conversation goes on from; None if there is no such conversation."""

    async def cancel(self, response_id: str) -> None:
        """Ask the process that runs it to end it."""

    async def renew(self, response_id: str) -> bool:
        """The caller still makes it. False if it shall not, and of one that was never put."""

    async def lock(self, conversation_id: str, response_id: str) -> bool:
        """Let no other turn work on this conversation until this response has ended, is unlocked, or was not
        renewed for long; False if there is one already."""

    async def unlock(self, response_id: str) -> None:
        """Its conversation, if it still has it locked, is free."""


_encoder = msgspec.msgpack.Encoder()
decoder = msgspec.msgpack.Decoder(StoredResponse)
turn_decoder = msgspec.msgpack.Decoder(PastTurn)


def encoded(stored: StoredResponse) -> bytes:
    """A response as it is kept. Bounds in schemas may be integers of any size, which become floats."""
    try:
        return _encoder.encode(stored)
    except OverflowError:
        return _encoder.encode(_in_64_bits(msgspec.to_builtins(stored)))


def _in_64_bits(value: object) -> object:
    if isinstance(value, dict):
        return {key: _in_64_bits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_64_bits(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value) if abs(value) < 2**1000 else math.copysign(math.inf, value)
    return value


def owned_key(owner: str | None, name: str) -> str:
    """By which a response or a conversation is kept: no name leads to what another owner has, as the names of
    owners hold no slash."""
    return f"{owner or ''}/{name}"


def conversation_of(stored: StoredResponse) -> str | None:
    conversation = stored.response.conversation
    return None if conversation is None else conversation.id


def alive_until_of(stored: StoredResponse, now: float) -> float:
    """When a response is lost unless it is renewed; 0 of one that has ended."""
    return 0.0 if stored.response.status in ENDED else now + RENEWED_FOR_S


def goes_on_from(stored: StoredResponse) -> bool:
    """Whether the next turn of a conversation builds on this response."""
    return stored.response.status in ("completed", "incomplete")


def broken_chain(link: str, response_id: str, limits: StoreLimits, field: str) -> ResponseNotStoredError:
    """The error of a chain that begins at ``response_id`` and breaks at ``link``."""
    what = f"Response {response_id[:100]!r}"
    if link != response_id:
        what = f"Response {link!r}, which {response_id!r} goes back to,"
    return ResponseNotStoredError(what, limits, field)


def as_it_stands(stored: StoredResponse, alive_until: float, now: float) -> StoredResponse:
    """The response; one whose maker is gone has failed: nobody else will say so."""
    if stored.response.status in ENDED or alive_until >= now:
        return stored
    error = ResponseError(code="server_error", message="The server process that ran this response has ended.")
    response = msgspec.structs.replace(stored.response, status="failed", error=error)
    return msgspec.structs.replace(stored, response=response)
