"""Computes the size in which a model reads a picture: by Qwen's rule, transformers' ``smart_resize``, or
Pixtral's."""

from __future__ import annotations

import math

from engine.media.limits import MediaFault
from engine.records.media import PictureModel, PictureSize

MAX_ASPECT_RATIO = 200
"""Maximum ratio of a picture's sides; Qwen's processors refuse longer pictures, too."""


def check_ratio(height: int, width: int) -> None:
    """Raises MediaFault for a picture that is too long and narrow, or has no pixels."""
    if not height or not width:
        raise MediaFault(f"is {width}x{height}: it has no pixels")
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise MediaFault(f"is {width}x{height}: one side is more than {MAX_ASPECT_RATIO} times the other")


def fitted_size(height: int, width: int, model: PictureModel) -> PictureSize:
    """The size to which a picture is resized: multiples of a token's side, of about the same shape,
    within the model's limits. MediaFault if it is too long and narrow."""
    check_ratio(height, width)
    if model.max_edge:
        return _within_edge(height, width, model)
    side = model.factor
    sides = (height, width)
    fitted = [round(each / side) * side for each in sides]
    if math.prod(fitted) > model.max_pixels:
        shrinks = math.sqrt((height * width) / model.max_pixels)
        fitted = [max(side, math.floor(each / shrinks / side) * side) for each in sides]
    elif math.prod(fitted) < model.min_pixels:
        grows = math.sqrt(model.min_pixels / (height * width))
        fitted = [math.ceil(each * grows / side) * side for each in sides]
    size = PictureSize(*fitted)
    if model.num_tokens(size) > model.max_tokens:
        raise MediaFault(f"is {width}x{height}: too narrow to fit into the model's {model.max_pixels} pixels")
    return size


def _within_edge(height: int, width: int, model: PictureModel) -> PictureSize:
    """Pixtral's rule: no side exceeds the model's limit, and both are rounded up to whole tokens."""
    ratio = max(height, width) / model.max_edge
    sides = (height, width) if ratio <= 1 else (math.floor(height / ratio), math.floor(width / ratio))
    fitted = [max(1, math.ceil(side / model.factor)) * model.factor for side in sides]
    return PictureSize(*fitted)
