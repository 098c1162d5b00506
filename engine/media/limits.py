"""Limits on the files of pictures, and what they are refused with."""

from __future__ import annotations

MAX_FILE_BYTES = 20 * 2**20
"""The most bytes of a picture's file."""
MAX_PIXELS = 64_000_000
"""The most pixels of a file: 8000x8000, Anthropic's limit. Pillow's own allows 179 million."""


class PictureFault(Exception):
    """Nothing can be shown of a picture; the text follows its name, as in "is broken"."""


class PixelsFailure(Exception):
    """The pixels of a picture could not be kept, for no fault of its own."""


def too_many_bytes(num_bytes: int) -> PictureFault:
    """The fault of a file of this size."""
    limit = f"{MAX_FILE_BYTES // 2**20} MiB"
    return PictureFault(f"has {num_bytes / 2**20:.1f} MiB; the limit for one picture is {limit}")


def too_many_pixels(width: int, height: int) -> PictureFault:
    """The fault of a picture of this size."""
    return PictureFault(f"has {width}x{height} pixels; at most {MAX_PIXELS} are decoded")
