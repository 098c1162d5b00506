"""Content that a model cannot be shown: pictures, audio, documents, files.

A client cannot remove what its history contains: a tool returned the picture, or another model had seen it.
So a line of text replaces it in the history, and the receipt lists it. In the user's last message it is an
error, since the user can still send something else.

Parts of all APIs and of MCP are recognized by their fields.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from engine.api.prompt.prompt_media import PromptMedia
from engine.errors import RequestError
from engine.media.picture_size import HEAD_BYTES, media_type_of, picture_size

Part = Mapping[str, Any]

MAX_NOTES = 20
"""Maximum number of notes that a receipt lists individually."""
MAX_NAME_CHARS = 200

_MEDIA_TYPE_FIELDS = ("media_type", "mimeType", "mime_type")
_DATA_FIELDS = ("data", "file_data", "blob", "image_data")
_URL_FIELDS = ("url", "image_url", "file_url", "video_url", "audio_url", "uri")
_NAME_FIELDS = ("filename", "name", "title", "file_id")
_NESTED_FIELDS = ("source", "resource", "file", "image_url", "input_audio", "video_url", "audio_url")


class LeftOut:
    """Notes on what the model was not shown, in the order of the request."""

    def __init__(self, media: PromptMedia | None = None) -> None:
        """``media``: what the model is shown besides text; None if it reads only text."""
        self.media = media
        self._notes: list[str] = []
        self._num_notes = 0

    @property
    def notes(self) -> list[str]:
        """Sentences for the receipt; beyond the limit, the number of further notes."""
        more = self._num_notes - len(self._notes)
        return [*self._notes, f"and {more} more"] if more else self._notes

    def add(self, where: str, what: str) -> None:
        """Notes that a part of the request had no effect."""
        self._num_notes += 1
        if len(self._notes) < MAX_NOTES:
            self._notes.append(f"{where}: {what}")

    def mark(self, part: Part, where: str, *, is_new: bool) -> str | None:
        """Returns the mark of a picture or clip; None if the model is not shown such parts. RequestError for
        a new one that cannot be read."""
        if self.media is None or not self.media.reads(part):
            return None
        return self.media.mark(part, where, partial(describe_part, part), is_new=is_new)

    def part(self, part: Part, where: str) -> str:
        """Notes a part that is left out, and returns its placeholder text."""
        text = text_of_resource(part)
        what = describe_part(part)
        if text is not None:
            return text
        self.add(where, what)
        return f"[{what}, left out: this model reads {self.takes}]"

    @property
    def takes(self) -> str:
        """What the model reads, in words."""
        return "text only" if self.media is None else f"text and {self.media.nouns} only"


def refuse_part(kind: str, where: str, left_out: LeftOut) -> RequestError:
    """Returns the error for a part in the user's last message."""
    return RequestError(f"{where} is of type {kind[:50]!r}; this server takes {left_out.takes}.", where)


def text_of_resource(part: Part) -> str | None:
    """The text of an MCP resource; None for other parts."""
    resource = part.get("resource")
    text = resource.get("text") if isinstance(resource, Mapping) else None
    return text if isinstance(text, str) else None


def describe_part(part: Part) -> str:
    """A short description of a part: ``image/png, 8x8``."""
    kind = part.get("type")
    named = kind.removeprefix("input_").removesuffix("_url") if isinstance(kind, str) else "part"
    media_type, head, num_bytes = _file_of(part)
    what = [_line(media_type or named)]
    if size := picture_size(head):
        what.append(f"{size[0]}x{size[1]}")
    elif num_bytes:
        what.append(_size(num_bytes))
    name = next(_texts(part, _NAME_FIELDS), None) or _address(part)
    if name:
        what.append(_line(name))
    return ", ".join(what)


def _file_of(part: Part) -> tuple[str | None, bytes, int]:
    """The media type, first bytes and size of a part's file, where known."""
    declared = next(_texts(part, _MEDIA_TYPE_FIELDS), None)
    data = next(_texts(part, _DATA_FIELDS), None) or next(
        (url for url in _texts(part, _URL_FIELDS) if url.startswith("data:")), ""
    )
    if data.startswith("data:"):
        begins, _, data = data.partition(",")
        declared = declared or begins.removeprefix("data:").partition(";")[0]
    head = _decoded(data[: HEAD_BYTES // 3 * 4])
    return media_type_of(head) or declared or _type_of_format(part), head, len(data) * 3 // 4


def _type_of_format(part: Part) -> str | None:
    """The media type of OpenAI's audio parts, which name only their format."""
    sound = part.get("input_audio")
    form = sound.get("format") if isinstance(sound, Mapping) else None
    return f"audio/{form}" if isinstance(form, str) else None


def _address(part: Part) -> str | None:
    return next((url for url in _texts(part, _URL_FIELDS) if not url.startswith("data:")), None)


def _texts(part: Part, fields: Sequence[str]) -> Iterator[str]:
    """The values of these fields, in the part itself and in its nested objects."""
    for record in (part, *(part.get(name) for name in _NESTED_FIELDS)):
        if isinstance(record, Mapping):
            for name in fields:
                value = record.get(name)
                if isinstance(value, str) and value:
                    yield value


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text[: len(text) // 4 * 4])
    except ValueError:
        return b""


def _size(num_bytes: int) -> str:
    return f"{num_bytes} bytes" if num_bytes < 1000 else f"{num_bytes / 1000:.0f} kB"


def _line(text: str) -> str:
    """Puts a text on one line and truncates it."""
    short = " ".join(text[: MAX_NAME_CHARS + 1].split())
    return short if len(short) <= MAX_NAME_CHARS else f"{short[:MAX_NAME_CHARS]}..."
