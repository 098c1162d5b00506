"""Decodes the bytes of a picture's file to pixels, as transformers' processors do. The only module that uses
Pillow; files of clients are decoded in a separate process."""

from __future__ import annotations

import warnings
from io import BytesIO

from PIL import Image, WebPImagePlugin  # noqa: F401  # loaded before memory is limited

from engine.media.file import write_new
from engine.media.limits import MAX_PIXELS, MediaFault, too_many_pixels
from engine.media.resizing import check_ratio, fitted_size
from engine.records.media import MediaModel, PictureModel, PictureSize

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The allowed formats. Decoders of other formats never run, whatever the file begins with."""

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The transposition that makes a picture upright, by its EXIF orientation."""

Image.MAX_IMAGE_PIXELS = MAX_PIXELS
Image.preinit()


def decode(data: bytes, model: MediaModel, path: str) -> PictureSize:
    """Writes the pixels of a file in the size in which the model reads them, and returns it.

    MediaFault if it is not a picture or too large. An OSError concerns the file at ``path``.
    """
    assert isinstance(model, PictureModel)
    try:
        with warnings.catch_warnings(), Image.open(BytesIO(data), formats=FORMATS) as picture:
            warnings.simplefilter("ignore")
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise too_many_pixels(width, height)
            check_ratio(height, width)  # before anything is decoded
            rgb = in_rgb(_upright(picture))
            fitted = fitted_size(rgb.height, rgb.width, model)
    except MediaFault:
        raise
    except Image.DecompressionBombError as error:
        raise MediaFault(f"has more than {MAX_PIXELS} pixels, the limit") from error
    except MemoryError as error:
        raise MediaFault("needs more memory to decode than a picture may") from error
    except Exception as error:  # decoders raise many types
        raise MediaFault("is broken: it cannot be decoded") from error
    write_pixels(rgb, fitted, path)
    return fitted


def _upright(picture: Image.Image) -> Image.Image:
    """Returns the picture turned according to its EXIF orientation, as transformers loads files."""
    try:
        turn = _TURNS.get(picture.getexif().get(_ORIENTATION, 1))
    except Exception:  # broken metadata does not affect the pixels
        turn = None
    return picture if turn is None else picture.transpose(turn)


def in_rgb(picture: Image.Image) -> Image.Image:
    """Returns the picture in RGB, with white for transparent parts, as transformers does. 16-bit gray is
    scaled to 8 bits; Pillow alone would clip it to white."""
    if picture.mode.startswith("I"):
        transparent = picture.info.get("transparency")
        picture = picture.convert("I").point(lambda value: value / 256, "L")
        if isinstance(transparent, int):
            picture.info["transparency"] = transparent >> 8
    if "A" not in picture.getbands() and picture.info.get("transparency") is None:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, picture).convert("RGB")


def write_pixels(rgb: Image.Image, fitted: PictureSize, path: str) -> None:
    """Writes [height, width, 3] bytes to a new file; none is left if that fails."""
    resized = rgb.resize((fitted.width, fitted.height), resample=Image.Resampling.BICUBIC)
    write_new(resized.tobytes(), path)
