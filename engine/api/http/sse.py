"""Server-sent events: their format on the wire."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
MEDIA_TYPE = "text/event-stream"

_encoder = msgspec.json.Encoder()


def event(payload: msgspec.Struct, name: str | None = None) -> bytes:
    """Encodes one event; OpenAI's chat streams have no names, Anthropic's and the Responses API's do."""
    data = b"data: " + _encoder.encode(payload) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


class Frame:
    """Encodes events that differ only in the one item of their last field, a list: the rest is encoded
    once."""

    def __init__(self, empty: msgspec.Struct) -> None:
        """``empty``: the payload with an empty list."""
        data = event(empty)
        end = data.rindex(b"]}")
        self._head = data[:end]
        self._tail = data[end:]

    def event(self, item: msgspec.Struct) -> bytes:
        """Returns the event with this item."""
        return self._head + _encoder.encode(item) + self._tail
