"""Checks the pictures of a prompt in the core, before any memory is sized by what the client states of
them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import RequestError
from engine.records.messages import MediaSpan
from engine.records.picture import PictureModel

MAX_HASH_CHARS = 200


def check_pictures(media: Sequence[MediaSpan], num_tokens: int, model: PictureModel | None) -> None:
    """Checks the pictures of a prompt of ``num_tokens`` tokens. RequestError names the invalid one."""
    if not media:
        return
    if model is None or len(media) > model.max_pictures:
        most = 0 if model is None else model.max_pictures
        raise RequestError(f"The prompt has {len(media)} pictures; this model takes {most}.", "media")
    end = 0
    for index, span in enumerate(media):
        if fault := _fault_of(span, end, num_tokens, model):
            raise RequestError(f"media[{index}] {fault}.", f"media[{index}]")
        end = span.end


def _fault_of(span: MediaSpan, start: int, num_tokens: int, model: PictureModel) -> str | None:
    pixels = span.pixels
    if not 0 < len(span.content_hash) <= MAX_HASH_CHARS:
        return f"needs a content hash of 1 to {MAX_HASH_CHARS} characters"
    if not start <= span.offset < span.end <= num_tokens:
        return f"has tokens {span.offset} to {span.end}, outside {start} to {num_tokens}"
    if pixels is None:
        return "has no pixels"
    sides = pixels.height, pixels.width
    if min(sides) < 1 or any(side % model.factor for side in sides):
        return f"is {pixels.width}x{pixels.height} pixels; both sides must be multiples of {model.factor}"
    if span.length > model.max_tokens or span.length != model.num_tokens(*sides):
        return f"has {span.length} tokens, which does not match its {pixels.width}x{pixels.height} pixels"
    return None
