"""Finds the picture or the clip in a content part of any API: OpenAI's, Anthropic's, MCP's.

It fetches and decodes nothing.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.media.limits import MAX_FILE_BYTES, MAX_PIXELS, MediaFault, too_many_bytes, too_many_pixels
from engine.media.picture_size import HEAD_BYTES, media_type_of, picture_size
from engine.media.resizing import check_ratio
from engine.records.media import MediaKind

MEDIA_TYPES = {
    MediaKind.IMAGE: frozenset(("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")),
    MediaKind.AUDIO: frozenset(("audio/wav", "audio/flac", "audio/ogg", "audio/mpeg")),
}
"""The supported types. If a file holds several pictures, the first is read."""
_FORMATS = {
    MediaKind.IMAGE: "a picture in PNG, JPEG, WebP, GIF or BMP",
    MediaKind.AUDIO: "audio in WAV, FLAC, OGG or MP3",
}

_PARTS = {
    **dict.fromkeys(("image_url", "input_image", "image", "computer_screenshot"), MediaKind.IMAGE),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), MediaKind.AUDIO),
}
"""The kinds of parts, by their types."""
_NESTED = ("source", "input_audio")
"""Fields of a part whose objects may hold the data."""
_URL_FIELDS = ("image_url", "audio_url", "source", "url")
_STEP_CHARS = 2**20
"""Characters of base64 that are decoded at a time: about a millisecond, during which no other thread runs."""

Part = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InlineMedia:
    """A file in base64 in the request itself."""

    base64: str


@dataclass(frozen=True, slots=True)
class RemoteMedia:
    """A file at an http or https URL."""

    url: str


MediaSource = InlineMedia | RemoteMedia


def media_kind(part: Part) -> MediaKind | None:
    """The kind of a content part, readable or not; None for parts of other kinds."""
    named = part.get("type")
    kind = _PARTS.get(named) if isinstance(named, str) else None
    return _kind_of_resource(part) if kind is None else kind


def media_source(part: Part) -> MediaSource:
    """Where the part's file is; MediaFault if the part names none that this server can read."""
    if _kind_of_resource(part) is not None:
        return InlineMedia(part["resource"]["blob"])
    nested = (part.get(name) for name in _NESTED)
    for record in (part, *(each for each in nested if isinstance(each, Mapping))):
        data = record.get("data")
        if isinstance(data, str) and data:
            return _of_data_url(data) if _is_data_url(data) else InlineMedia(data)
    url = _url_of(part)
    if url is None:
        raise MediaFault("holds neither a URL nor data; this server keeps no files by id")
    if _is_data_url(url):
        return _of_data_url(url)
    if url[:8].lower().startswith(("http://", "https://")):
        return RemoteMedia(url)
    raise MediaFault("must be a data: URL, or one of http or https")


def _kind_of_resource(part: Part) -> MediaKind | None:
    """The kind of an MCP resource with data."""
    resource = part.get("resource")
    if not isinstance(resource, Mapping) or not isinstance(resource.get("blob"), str):
        return None
    named = resource.get("mimeType")
    first = named.lower().partition("/")[0] if isinstance(named, str) else ""
    return next((kind for kind in MediaKind if kind == first), None)


def _url_of(part: Part) -> str | None:
    """The first URL in the fields of the APIs, directly or in the object of such a field."""
    for value in (part.get(name) for name in _URL_FIELDS):
        url = value.get("url") if isinstance(value, Mapping) else value
        if isinstance(url, str) and url:
            return url
    return None


def _is_data_url(url: str) -> bool:
    """Whether the URL is a data URL; upper and lower case are equal in schemes."""
    return url[:5].lower() == "data:"


def _of_data_url(url: str) -> InlineMedia:
    head, comma, data = url.partition(",")
    if not comma or not head.rstrip().lower().endswith(";base64"):
        raise MediaFault("must be a data: URL in base64, such as data:image/png;base64,...")
    return InlineMedia(data)


def read_inline(source: InlineMedia, kind: MediaKind) -> bytes:
    """The file in a request. MediaFault if it is of another kind, or too large to decode."""
    if len(source.base64) // 4 * 3 > MAX_FILE_BYTES[kind] + 3:
        raise too_many_bytes(len(source.base64) // 4 * 3, kind)
    try:
        data = _decoded(source.base64)
    except ValueError:
        try:  # some clients fold it into lines
            data = _decoded("".join(source.base64.split()))
        except ValueError as error:
            raise MediaFault("is not valid base64") from error
    check_file(data, kind)
    return data


def _decoded(text: str) -> bytes:
    """Decodes base64 with or without padding; ValueError if it is invalid."""
    if len(text) % 4:
        text += "=" * (-len(text) % 4)
    steps = range(0, len(text), _STEP_CHARS)
    return b"".join(b64decode(text[start : start + _STEP_CHARS], validate=True) for start in steps)


def check_file(data: bytes, kind: MediaKind) -> None:
    """Checks what can be seen without decoding. MediaFault if it is of another kind, or too large."""
    if len(data) > MAX_FILE_BYTES[kind]:
        raise too_many_bytes(len(data), kind)
    head = data[:HEAD_BYTES]
    if media_type_of(head) not in MEDIA_TYPES[kind]:
        raise MediaFault(f"is not {_FORMATS[kind]}")
    size = picture_size(head)
    if size is not None:
        if size[0] * size[1] > MAX_PIXELS:
            raise too_many_pixels(*size)
        check_ratio(size[1], size[0])
