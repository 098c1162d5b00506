"""Stores responses between turns, within limits: the least recently used are evicted.

The limits apply to responses that have ended. A running one is never evicted; ``max_background_responses`` of
each process bounds their number.

``MemoryStore`` is for a server of one process; ``SqliteStore`` is one file for several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
"""A running turn that has not been renewed for this long is lost: its response has failed, and its
conversation is unlocked."""


class StoredResponse(msgspec.Struct, kw_only=True, frozen=True):
    """A response and its input. Earlier turns are stored separately."""

    response: Response
    input: list[Item]
    """The input items of this turn only, each with an id."""
    previous_id: str | None = None
    """The previous response, even if the request named a conversation instead."""
    job_id: str | None = None
    """The job's id, from the client or inferred: the next turn belongs to it too."""


class PastResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The fields of a response that later turns need; it is read without tools and instructions."""

    id: str
    status: ResponseStatus
    created_at: int
    conversation: ConversationId | None
    output: list[OutputItem]
    metadata: dict[str, Any]


class PastTurn(msgspec.Struct, kw_only=True, frozen=True):
    """The fields of a stored response that later turns need."""

    response: PastResponse
    input: list[Item]
    previous_id: str | None
    job_id: str | None


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of responses that have ended, over all processes."""

    max_responses: int = 10_000
    max_bytes: int = 256 * 2**20


class ResponseNotStoredError(NotFoundError):
    """The named response or conversation was never stored, or is no longer stored."""

    def __init__(self, what: str, limits: StoreLimits, field: str | None = None) -> None:
        super().__init__(
            f"{what} is not stored: it was never kept, was deleted, or newer ones replaced it. This server "
            f"keeps the {limits.max_responses} responses used last, in at most {limits.max_bytes} bytes.",
            field,
        )


class ResponseStore(Protocol):
    """A store of responses. Each use of a response makes it the most recently used.

    A store is one owner's view: only that owner's ids are found and conversations locked.
    """

    limits: StoreLimits

    def of(self, owner: str | None) -> ResponseStore:
        """Returns the store as another owner sees it."""

    async def put(self, stored: StoredResponse) -> None:
        """Stores the response, replacing an earlier state. One that has ended becomes its
        conversation's newest, and the conversation is unlocked."""

    async def update(self, stored: StoredResponse) -> bool:
        """Stores a later state; False, without effect, if the response was deleted or evicted."""

    async def get(self, response_id: str) -> StoredResponse | None:
        """The response; None if it was never stored, or is no longer stored."""

    async def chain(self, response_id: str, field: str) -> list[PastTurn]:
        """Returns the response and all before it, oldest first; ResponseNotStoredError for ``field`` if one
        is missing."""

    async def tip(self, response_id: str, earlier: Sequence[str]) -> PastTurn | None:
        """Returns only the response, if its ``chain`` has these before it; None unless all are stored."""

    async def delete(self, response_id: str) -> bool:
        """Deletes the response; False if it is not stored."""

    async def newest(self, conversation_id: str) -> str | None:
        """The newest response of a conversation; None if there is no such conversation."""

    async def cancel(self, response_id: str) -> None:
        """Requests the process that runs the response to end it."""

    async def renew(self, response_id: str) -> bool:
        """Renews a running response. False if it was cancelled or was never stored."""

    async def lock(self, conversation_id: str, response_id: str) -> bool:
        """Locks the conversation until this response has ended, is unlocked, or is not renewed for
        long; False if it is locked already."""

    async def unlock(self, response_id: str) -> None:
        """Unlocks the conversation of the response, if it still has the lock."""


_encoder = msgspec.msgpack.Encoder()
decoder = msgspec.msgpack.Decoder(StoredResponse)
turn_decoder = msgspec.msgpack.Decoder(PastTurn)


def encoded(stored: StoredResponse) -> bytes:
    """Encodes a response. Integers beyond 64 bits in schemas become floats."""
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
    """The key of a response or conversation. Owners' names contain no slash, so no name leads to another
    owner's data."""
    return f"{owner or ''}/{name}"


def conversation_of(stored: StoredResponse) -> str | None:
    conversation = stored.response.conversation
    return None if conversation is None else conversation.id


def alive_until_of(stored: StoredResponse, now: float) -> float:
    """The time at which a response is lost unless renewed; 0 if it has ended."""
    return 0.0 if stored.response.status in ENDED else now + RENEWED_FOR_S


def goes_on_from(stored: StoredResponse) -> bool:
    """Whether the next turn of a conversation builds on this response."""
    return stored.response.status in ("completed", "incomplete")


def broken_chain(link: str, response_id: str, limits: StoreLimits, field: str) -> ResponseNotStoredError:
    """Returns the error for the chain of ``response_id``, in which ``link`` is missing."""
    what = f"Response {response_id[:100]!r}"
    if link != response_id:
        what = f"Response {link!r}, which {response_id!r} continues,"
    return ResponseNotStoredError(what, limits, field)


def as_it_stands(stored: StoredResponse, alive_until: float, now: float) -> StoredResponse:
    """Returns the response, marked as failed if the process that ran it is gone."""
    if stored.response.status in ENDED or alive_until >= now:
        return stored
    error = ResponseError(code="server_error", message="The server process that ran this response has ended.")
    response = msgspec.structs.replace(stored.response, status="failed", error=error)
    return msgspec.structs.replace(stored, response=response)
