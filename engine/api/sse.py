"""Server-sent events: how a stream of results looks on the wire."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = "text/event-stream"

_encoder = msgspec.json.Encoder()


def event(payload: msgspec.Struct) -> bytes:
    return b"data: " + _encoder.encode(payload) + b"\n\n"
