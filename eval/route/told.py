"""Derives a request's job, its owner and the beginning of its prompt before the request goes to a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any
from uuid import uuid4

import msgspec

from engine.api.service.identity import ClientIdentity, identify
from engine.errors import RequestError
from engine.records.messages import JobRef
from engine.routing import RoutedTurn

_PIECE_BYTES = 4
"""Bytes of text that count as a token: the average of English text."""
MAX_TEXT_BYTES = 2**20
"""Bytes at the beginning of a prompt that distinguish it from others."""
MAX_FIELD_BYTES = 2**16
"""A longer field cannot name a job."""


class _Body(msgspec.Struct):
    """The fields that are read, as raw JSON: a body of many megabytes is parsed in one pass, and none of its
    messages becomes an object."""

    job_id: msgspec.Raw = msgspec.Raw()
    parent_job_id: msgspec.Raw = msgspec.Raw()
    vllm_xargs: msgspec.Raw = msgspec.Raw()
    session_id: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    conversation: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Body)


def turn_of(headers: Mapping[str, str], body: bytes) -> RoutedTurn:
    """Returns the turn as a router sees it. A body that no server would understand has no job.

    The prompt's tokens are pieces of its text: only servers have the tokenizer.
    """
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        fields = _Body()
    try:
        job = identify(headers, _identity(fields))
    except RequestError:
        job = JobRef()
    key = headers.get("authorization") or headers.get("x-api-key")
    salt = _small(fields.cache_salt)
    return RoutedTurn(
        uuid4().hex,
        _pieces(_text_of(fields)),
        job_id=job.job_id,
        parent_id=job.parent_id,
        owner=None if key is None else blake2b(key.encode("utf-8", "replace"), digest_size=8).hexdigest(),
        cache_salt=salt if isinstance(salt, str) else None,
    )


def _small(raw: msgspec.Raw) -> Any:
    """Returns the value of a small field; None for a missing or long one."""
    if not 0 < len(raw) <= MAX_FIELD_BYTES:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def _identity(fields: _Body) -> ClientIdentity:
    metadata = _small(fields.metadata)
    previous = _small(fields.previous_response_id)
    return ClientIdentity(
        job_id=_small(fields.job_id),
        parent_job_id=_small(fields.parent_job_id),
        xargs=_small(fields.vllm_xargs),
        session_id=_small(fields.session_id),
        metadata_user_id=metadata.get("user_id") if isinstance(metadata, dict) else None,
        prompt_cache_key=_small(fields.prompt_cache_key),
        conversation=_small(fields.conversation),
        previous_job_id=previous if isinstance(previous, str) else None,
    )


def _text_of(fields: _Body) -> bytes:
    """Returns what is the same at the beginning of a job's prompts, whatever the order of the body's fields:
    first what templates put before the conversation. A list is left open, as it continues in the next
    turn."""
    before = (fields.system, fields.instructions, fields.tools)
    text = b"\n".join(bytes(memoryview(part)[:MAX_TEXT_BYTES]) for part in before if len(part))
    for said in (fields.messages, fields.input, fields.prompt):
        if len(said) and len(text) < MAX_TEXT_BYTES:
            written = memoryview(said)
            written = written[:-1] if written[-1] == ord("]") else written
            text += b"\n" + bytes(written[: MAX_TEXT_BYTES - len(text)])
    return text[:MAX_TEXT_BYTES]


def _pieces(text: bytes) -> Sequence[int]:
    whole = len(text) // _PIECE_BYTES * _PIECE_BYTES
    return memoryview(text[:whole]).cast("I")
