"""Pictures of models that limit the longest side equal those of transformers' Pixtral processors."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import SizeDict
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)

from engine.media.decoding import decode
from engine.media.resizing import MAX_ASPECT_RATIO, fitted_size
from engine.records.media import PictureModel, PictureSize
from tests.media.pictures import file_of, noise

MODEL = PictureModel(10, 14, 2, 0, 280**2, 64, max_edge=280, row_end_id=12, end_id=13)


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_sizes(height: int, width: int) -> None:
    assume(max(height, width) <= MAX_ASPECT_RATIO * min(height, width))
    picture: Any = np.empty((height, width, 0), np.uint8)
    wanted = get_resize_output_image_size(picture, (280, 280), (28, 28), input_data_format="channels_last")
    fitted = fitted_size(height, width, MODEL)
    assert (fitted.height, fitted.width) == tuple(wanted)
    assert MODEL.num_tokens(fitted) == len(MODEL.token_ids(fitted)) <= MODEL.max_tokens


def test_pixels(tmp_path: Path) -> None:
    data = file_of(noise(600, 333), "PNG")
    size = decode(data, MODEL, str(tmp_path / "pixels"))
    pixels = np.fromfile(tmp_path / "pixels", np.uint8).reshape(size.height, size.width, 3)
    processor = PixtralImageProcessorPil()
    image = processor.process_image(Image.open(BytesIO(data)))
    patch = SizeDict(height=28, width=28)
    wanted = processor.resize(image, SizeDict(longest_edge=280), patch, processor.resample)
    assert np.array_equal(pixels, np.moveaxis(wanted, 0, -1))


def test_tokens() -> None:
    """Each row ends with a token and the last row with another one, as in the processor's text."""
    assert MODEL.token_ids(PictureSize(84, 112)) == [*[10] * 4, 12, *[10] * 4, 12, *[10] * 4, 13]
    assert MODEL.token_ids(PictureSize(28, 56)) == [10, 10, 13]
