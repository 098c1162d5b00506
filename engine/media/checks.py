"""Checks the pictures and clips of a prompt in the core, before any memory is sized by what the client states
of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.errors import RequestError
from engine.records.media import MediaKind, MediaModels
from engine.records.messages import MediaSpan

MAX_HASH_CHARS = 200


def check_media(media: Sequence[MediaSpan], num_tokens: int, models: MediaModels | None) -> None:
    """Checks the media of a prompt of ``num_tokens`` tokens. RequestError names the invalid one."""
    if not media:
        return
    counts = Counter(MediaKind.IMAGE if span.size is None else span.size.kind for span in media)
    for kind, count in counts.items():
        model = None if models is None else models.of(kind)
        most = 0 if model is None else model.max_count
        if count > most:
            raise RequestError(f"The prompt has {count} {kind.noun}s; this model takes {most}.", "media")
    assert models is not None, "it has been counted"
    end = 0
    for index, span in enumerate(media):
        if fault := _fault_of(span, end, num_tokens, models):
            raise RequestError(f"media[{index}] {fault}.", f"media[{index}]")
        end = span.end


def _fault_of(span: MediaSpan, start: int, num_tokens: int, models: MediaModels) -> str | None:
    if not 0 < len(span.content_hash) <= MAX_HASH_CHARS:
        return f"needs a content hash of 1 to {MAX_HASH_CHARS} characters"
    if not start <= span.offset < span.end <= num_tokens:
        return f"has tokens {span.offset} to {span.end}, outside {start} to {num_tokens}"
    size = span.size
    if size is None or not span.path:
        return "has no size or file"
    model = models.of(size.kind)
    assert model is not None, "check_media() has counted it"
    if fault := model.fault_of(size):
        return fault
    if span.length > model.max_tokens or span.length != model.num_tokens(size):
        return f"has {span.length} tokens, which does not match the size of this {size.kind.noun}"
    return None
