"""Pictures for tests: files in several formats, and the parts of requests that hold them."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from engine.records.media import PictureModel

QWEN = PictureModel(
    token_id=5, patch_size=14, merge_size=2, min_pixels=56 * 56, max_pixels=28 * 28 * 1280, max_count=8
)
"""Qwen2.5-VL's settings, except for the token."""
SMALL = PictureModel(
    token_id=5, patch_size=4, merge_size=2, min_pixels=8 * 8, max_pixels=64 * 64, max_count=8
)
"""Settings of a tiny model: a token is 8x8 pixels."""


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A picture of random pixels."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    shape = (height, width) if channels == 1 else (height, width, channels)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), mode)


def file_of(picture: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = BytesIO()
    picture.save(out, form, **options)
    return out.getvalue()


def png(width: int = 32, height: int = 24, seed: int = 0) -> bytes:
    """A PNG file with different content for each seed."""
    return file_of(noise(width, height, seed=seed))


def flat_png(width: int, height: int, mode: str = "L") -> bytes:
    """A small file of a large picture."""
    return file_of(Image.new(mode, (width, height)))


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


def image_url(data: bytes, **more: Any) -> dict[str, Any]:
    """A picture part of OpenAI's chat completions."""
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def image_block(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    """A picture block of Anthropic's messages."""
    source = {"type": "base64", "media_type": kind, "data": b64encode(data).decode()}
    return {"type": "image", "source": source}
