"""Finds the picture in a content part of any API: OpenAI's chat and Responses, Anthropic's, MCP's.

It fetches and decodes nothing.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.media.limits import MAX_FILE_BYTES, MAX_PIXELS, PictureFault, too_many_bytes, too_many_pixels
from engine.media.picture_size import HEAD_BYTES, media_type_of, picture_size
from engine.media.resizing import check_ratio

MEDIA_TYPES = frozenset(("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"))
"""The supported types. If a file holds several pictures, the first is read."""

PICTURE_PARTS = frozenset(("image_url", "input_image", "image", "computer_screenshot"))
_STEP_CHARS = 2**20
"""Characters of base64 that are decoded at a time: about a millisecond, during which no other thread runs."""

Part = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InlinePicture:
    """A picture in base64 in the request itself."""

    base64: str


@dataclass(frozen=True, slots=True)
class RemotePicture:
    """A picture at an http or https URL."""

    url: str


PictureSource = InlinePicture | RemotePicture


def is_picture(part: Part) -> bool:
    """Whether a content part is a picture, readable or not."""
    kind = part.get("type")
    return (isinstance(kind, str) and kind in PICTURE_PARTS) or _blob_of_resource(part) is not None


def picture_source(part: Part) -> PictureSource:
    """Where the part's picture is; PictureFault if the part names none that this server can read."""
    blob = _blob_of_resource(part)
    if blob is not None:
        return InlinePicture(blob)
    source = part.get("source")
    for record in (part, source if isinstance(source, Mapping) else {}):
        data = record.get("data")
        if isinstance(data, str) and data:
            return _of_data_url(data) if _is_data_url(data) else InlinePicture(data)
    url = _url_of(part)
    if url is None:
        raise PictureFault("holds neither a URL nor data of a picture; this server keeps no files by id")
    if _is_data_url(url):
        return _of_data_url(url)
    if url[:8].lower().startswith(("http://", "https://")):
        return RemotePicture(url)
    raise PictureFault("must be a data: URL, or one of http or https")


def _blob_of_resource(part: Part) -> str | None:
    """The data of an MCP resource that is a picture."""
    resource = part.get("resource")
    if not isinstance(resource, Mapping):
        return None
    blob = resource.get("blob")
    kind = resource.get("mimeType")
    is_image = isinstance(kind, str) and kind.lower().startswith("image/")
    return blob if isinstance(blob, str) and is_image else None


def _url_of(part: Part) -> str | None:
    """The first URL in the fields of the APIs, directly or in the object of such a field."""
    source = part.get("source")
    for value in (part.get("image_url"), source, part.get("url")):
        url = value.get("url") if isinstance(value, Mapping) else value
        if isinstance(url, str) and url:
            return url
    return None


def _is_data_url(url: str) -> bool:
    """Whether the URL is a data URL; upper and lower case are equal in schemes."""
    return url[:5].lower() == "data:"


def _of_data_url(url: str) -> InlinePicture:
    head, comma, data = url.partition(",")
    if not comma or not head.rstrip().lower().endswith(";base64"):
        raise PictureFault("must be a data: URL in base64, such as data:image/png;base64,...")
    return InlinePicture(data)


def read_inline(source: InlinePicture) -> bytes:
    """The file of a picture in a request. PictureFault if it is not a picture, or too large to decode."""
    if len(source.base64) // 4 * 3 > MAX_FILE_BYTES + 3:
        raise too_many_bytes(len(source.base64) // 4 * 3)
    try:
        data = _decoded(source.base64)
    except ValueError:
        try:  # some clients fold it into lines
            data = _decoded("".join(source.base64.split()))
        except ValueError as error:
            raise PictureFault("is not valid base64") from error
    check_file(data)
    return data


def _decoded(text: str) -> bytes:
    """Decodes base64 with or without padding; ValueError if it is invalid."""
    if len(text) % 4:
        text += "=" * (-len(text) % 4)
    steps = range(0, len(text), _STEP_CHARS)
    return b"".join(b64decode(text[start : start + _STEP_CHARS], validate=True) for start in steps)


def check_file(data: bytes) -> None:
    """Checks what can be seen without decoding. PictureFault if it is not a picture, or too large."""
    if len(data) > MAX_FILE_BYTES:
        raise too_many_bytes(len(data))
    head = data[:HEAD_BYTES]
    if media_type_of(head) not in MEDIA_TYPES:
        raise PictureFault("is not a picture in PNG, JPEG, WebP, GIF or BMP")
    size = picture_size(head)
    if size is not None:
        if size[0] * size[1] > MAX_PIXELS:
            raise too_many_pixels(*size)
        check_ratio(size[1], size[0])
