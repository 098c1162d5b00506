"""Reads the type of a file, and the width and height of an image, from its first bytes; decodes nothing."""

from __future__ import annotations

HEAD_BYTES = 65536
"""How many bytes of a file are read: in photographs, metadata precedes the size."""

_JPEG_SIZES = frozenset((*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)))
"""Markers of the JPEG segments that hold the size."""


def media_type_of(head: bytes) -> str | None:
    """The media type according to the file's first bytes; None if unknown."""
    if head.startswith(b"RIFF"):
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav"}.get(head[8:12])
    signs = {
        b"\x89PNG\r\n\x1a\n": "image/png",
        b"GIF8": "image/gif",
        b"BM": "image/bmp",
        b"\xff\xd8\xff": "image/jpeg",
        b"%PDF-": "application/pdf",
        b"ID3": "audio/mpeg",
        **dict.fromkeys(
            (b"\xff\xfb", b"\xff\xfa", b"\xff\xf3", b"\xff\xf2", b"\xff\xe3", b"\xff\xe2"), "audio/mpeg"
        ),
        b"OggS": "audio/ogg",
        b"fLaC": "audio/flac",
    }
    return next((kind for sign, kind in signs.items() if head.startswith(sign)), None)


def picture_size(head: bytes) -> tuple[int, int] | None:
    """Width and height; None if the bytes do not hold them."""
    match media_type_of(head):
        case "image/png" if len(head) >= 24:
            return _big(head[16:20]), _big(head[20:24])
        case "image/gif" if len(head) >= 10:
            return _little(head[6:8]), _little(head[8:10])
        case "image/webp" if len(head) >= 30:
            return _size_of_webp(head)
        case "image/jpeg":
            return _size_of_jpeg(head)
        case "image/bmp" if len(head) >= 26:
            return _size_of_bmp(head)
    return None


def _size_of_webp(head: bytes) -> tuple[int, int] | None:
    match head[12:16]:
        case b"VP8 ":
            return _little(head[26:28]) & 0x3FFF, _little(head[28:30]) & 0x3FFF
        case b"VP8L":
            bits = _little(head[21:25])
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":
            return _little(head[24:27]) + 1, _little(head[27:30]) + 1
    return None


def _size_of_bmp(head: bytes) -> tuple[int, int]:
    """The height is negative if the first row is the topmost."""
    if _little(head[14:18]) == 12:
        return _little(head[18:20]), _little(head[20:22])
    height = int.from_bytes(head[22:26], "little", signed=True)
    return _little(head[18:22]), abs(height)


def _size_of_jpeg(head: bytes) -> tuple[int, int] | None:
    """Finds the segment that holds the size by skipping those before it."""
    at = 2
    while at + 9 <= len(head) and head[at] == 0xFF:
        if head[at + 1] in _JPEG_SIZES:
            return _big(head[at + 7 : at + 9]), _big(head[at + 5 : at + 7])
        at += 2 + max(2, _big(head[at + 2 : at + 4]))
    return None


def _big(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")
