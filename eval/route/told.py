"""What a request tells of its job, before it goes to a server: who it is of, and how its prompt begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any
from uuid import uuid4

import msgspec

from engine.api.identity import ClientIdentity, identify
from engine.errors import RequestError
from engine.routing import RoutedTurn

_PIECE_BYTES = 4
"""Bytes of text that count as a token: what texts in English have on average."""
_BEFORE = ("system", "instructions", "tools")
"""What templates put before the conversation."""
_CONVERSATIONS = ("messages", "input", "prompt")


def turn_of(headers: Mapping[str, str], body: bytes) -> RoutedTurn:
    """The turn as a router sees it. A body that no server would understand is of no job.

    The prompt's tokens are pieces of its text: servers have the tokenizer.
    """
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError:
        fields = None
    if not isinstance(fields, dict):
        fields = {}
    try:
        job_id = identify(headers, _identity(fields)).job_id
    except RequestError:
        job_id = None
    key = headers.get("authorization") or headers.get("x-api-key")
    return RoutedTurn(
        uuid4().hex,
        _pieces(_text_of(fields)),
        job_id=job_id,
        owner=None if key is None else blake2b(key.encode(), digest_size=8).hexdigest(),
        cache_salt=fields.get("cache_salt") if isinstance(fields.get("cache_salt"), str) else None,
    )


def _identity(fields: Mapping[str, Any]) -> ClientIdentity:
    metadata, previous = fields.get("metadata"), fields.get("previous_response_id")
    return ClientIdentity(
        job_id=fields.get("job_id"),
        xargs=fields.get("vllm_xargs"),
        session_id=fields.get("session_id"),
        metadata_user_id=metadata.get("user_id") if isinstance(metadata, dict) else None,
        prompt_cache_key=fields.get("prompt_cache_key"),
        conversation=fields.get("conversation"),
        previous_job_id=previous if isinstance(previous, str) else None,
    )


def _text_of(fields: Mapping[str, Any]) -> bytes:
    """What is the same at the beginning of a job's prompts, whatever the order of the body's fields."""
    parts: list[object] = [fields.get(name) for name in _BEFORE]
    for name in _CONVERSATIONS:
        said = fields.get(name)
        parts += said if isinstance(said, list) else [said]
    return b"\n".join(msgspec.json.encode(part) for part in parts if part is not None)


def _pieces(text: bytes) -> Sequence[int]:
    whole = len(text) // _PIECE_BYTES * _PIECE_BYTES
    return memoryview(text[:whole]).cast("I")
