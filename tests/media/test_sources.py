"""The parts of each API that hold a picture, and the errors of malformed ones."""

from __future__ import annotations

from base64 import b64encode
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.media.limits import MAX_FILE_BYTES, MediaFault
from engine.media.sources import (
    InlineMedia,
    RemoteMedia,
    check_file,
    media_kind,
    media_source,
    read_inline,
)
from engine.records.media import MediaKind
from tests.media.pictures import data_url, flat_png, image_block, image_url, png

DATA = png()
TEXT = b64encode(DATA).decode()
URL = data_url(DATA)
FIELDS = ("url", "image_url", "data", "file_id", "mimeType", "blob", "media_type", "uri")


@pytest.mark.parametrize(
    "part",
    [
        image_url(DATA, detail="high"),
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None},
        {"type": "computer_screenshot", "image_url": URL},
        image_block(DATA),
        {"type": "image", "source": {"type": "url", "url": URL}},
        {"type": "image", "data": TEXT, "mimeType": "image/png"},
        {"type": "image", "data": URL},
        {"type": "resource", "resource": {"uri": "a:b", "mimeType": "image/png", "blob": TEXT}},
    ],
)
def test_the_picture_of_a_part_is_found(part: dict[str, Any]) -> None:
    assert media_kind(part) is MediaKind.IMAGE
    source = media_source(part)
    assert isinstance(source, InlineMedia)
    assert read_inline(source, MediaKind.IMAGE) == DATA


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "input_image", "image_url": "HTTP://example.com/a.png"},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
    ],
)
def test_a_picture_at_a_url_is_not_fetched_yet(part: dict[str, Any]) -> None:
    assert isinstance(media_source(part), RemoteMedia)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "image"},
        {"type": "input_audio", "input_audio": {"data": TEXT, "format": "wav"}},
        {"type": "video_url", "video_url": {"url": URL}},
        {"type": "file", "file": {"file_data": URL}},
        {"type": "resource", "resource": {"mimeType": "application/pdf", "blob": TEXT}},
        {"type": ["image"]} | {"type": 3},
    ],
)
def test_other_parts_are_no_pictures(part: dict[str, Any]) -> None:
    assert media_kind(part) is not MediaKind.IMAGE


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ({"type": "image_url"}, "neither a URL nor data"),
        ({"type": "image_url", "image_url": {"url": ""}}, "neither a URL nor data"),
        ({"type": "input_image", "file_id": "file-1"}, "keeps no files by id"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "keeps no files by id"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "must be a data: URL, or one of"),
        ({"type": "image_url", "image_url": {"url": "ftp://a/b.png"}}, "must be a data: URL, or one of"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "data: URL in base64"),
        ({"type": "image_url", "image_url": 5}, "neither a URL nor data"),
    ],
)
def test_a_part_without_a_picture_that_can_be_read_is_at_fault(part: dict[str, Any], fault: str) -> None:
    with pytest.raises(MediaFault, match=fault):
        media_source(part)


def test_base64_may_be_folded_and_unpadded() -> None:
    folded = "\n".join(TEXT[start : start + 76] for start in range(0, len(TEXT), 76))
    assert read_inline(InlineMedia(folded), MediaKind.IMAGE) == DATA
    assert read_inline(InlineMedia(TEXT.rstrip("=")), MediaKind.IMAGE) == DATA


def test_base64_of_many_steps_is_read_whole() -> None:
    long = DATA + bytes(3 * 2**20 + 1)
    assert read_inline(InlineMedia(b64encode(long).decode()), MediaKind.IMAGE) == long


@pytest.mark.parametrize("text", ["%%%%", "abc=def", TEXT[:50] + "é" + TEXT[50:], TEXT[:-3] + "=", "A"])
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(MediaFault, match=r"is not (valid base64|a picture)"):
        read_inline(InlineMedia(text), MediaKind.IMAGE)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.just(URL) | st.just(TEXT),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=6,
)


@given(part=st.dictionaries(st.sampled_from(("type", "source", "resource", *FIELDS)), ANYTHING))
def test_whatever_a_part_holds_is_a_picture_or_a_fault(part: dict[str, Any]) -> None:
    for kind in (part.get("type"), "image", "image_url"):
        known = {**part, "type": kind}
        if media_kind(known) is MediaKind.IMAGE:
            with suppress(MediaFault):
                source = media_source(known)
                if isinstance(source, InlineMedia):
                    read_inline(source, MediaKind.IMAGE)


def webp_head(width: int, height: int) -> bytes:
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + sizes + bytes(100)


def bmp_head(width: int, height: int) -> bytes:
    sizes = width.to_bytes(4, "little") + height.to_bytes(4, "little", signed=True)
    return b"BM" + bytes(12) + (40).to_bytes(4, "little") + sizes + bytes(100)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "is not a picture in PNG, JPEG, WebP, GIF or BMP"),
        (b"%PDF-1.7 ...", "is not a picture"),
        (b"II*\0" + bytes(50), "is not a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not a picture"),
        (flat_png(9000, 8000), "has 9000x8000 pixels; at most 64000000"),
        (webp_head(16383, 16383), "has 16383x16383 pixels"),
        (bmp_head(30000, -30000), "has 30000x30000 pixels"),
        (DATA + bytes(MAX_FILE_BYTES[MediaKind.IMAGE]), "the limit for one picture is 20 MiB"),
    ],
)
def test_what_shows_without_decoding_is_refused_at_once(data: bytes, fault: str) -> None:
    with pytest.raises(MediaFault, match=fault):
        check_file(data, MediaKind.IMAGE)


def test_too_much_base64_is_refused_before_it_is_read() -> None:
    with pytest.raises(MediaFault, match="the limit for one picture is 20 MiB"):
        read_inline(InlineMedia("%" * (MAX_FILE_BYTES[MediaKind.IMAGE] * 4 // 3 + 100)), MediaKind.IMAGE)
