"""Limits on the files of pictures, and the errors for pictures that exceed them."""

from __future__ import annotations

MAX_FILE_BYTES = 20 * 2**20
"""Maximum size of a picture's file."""
MAX_PIXELS = 64_000_000
"""Maximum number of pixels of a file: 8000x8000, Anthropic's limit. Pillow's own limit is 179 million."""


class PictureFault(Exception):
    """The picture cannot be used. The message follows the picture's name, as in "is broken"."""


class PixelsFailure(Exception):
    """The pixels of a picture could not be stored; the picture itself is not at fault."""


def too_many_bytes(num_bytes: int) -> PictureFault:
    """Returns the fault of a file of this size."""
    limit = f"{MAX_FILE_BYTES // 2**20} MiB"
    return PictureFault(f"has {num_bytes / 2**20:.1f} MiB; the limit for one picture is {limit}")


def too_many_pixels(width: int, height: int) -> PictureFault:
    """Returns the fault of a picture of this size."""
    return PictureFault(f"has {width}x{height} pixels; at most {MAX_PIXELS} are decoded")
