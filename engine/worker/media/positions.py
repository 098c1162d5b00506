"""The positions of a prompt with pictures: M-RoPE (arXiv:2409.12191, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.records.media import PictureSize
from engine.records.messages import MediaSpan
from engine.worker.attention.backend import IntArray


def rope_positions(num_tokens: int, media: Sequence[MediaSpan], factor: int) -> tuple[IntArray, int]:
    """Returns positions in time, height and width: [3, num_tokens], and the difference between the position
    and the index of each token after the prompt.

    Text and clips increase all three alike. A picture is one moment; its tokens have their row and their
    column, of ``factor`` pixels each. Text continues after the longer side.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    index = place = 0
    for span in media:
        if not isinstance(span.size, PictureSize):
            continue
        place = _count_on(positions, index, span.offset, place)
        rows = span.size.height // factor
        columns = span.size.width // factor
        its = positions[:, span.offset : span.end]
        its[0] = place
        its[1] = place + np.repeat(np.arange(rows), columns)
        its[2] = place + np.tile(np.arange(columns), rows)
        place += max(rows, columns)
        index = span.end
    place = _count_on(positions, index, num_tokens, place)
    return positions, place - num_tokens


def _count_on(positions: IntArray, index: int, end: int, place: int) -> int:
    """Number the tokens of text in [index, end) from ``place`` on; returns the next position."""
    positions[:, index:end] = np.arange(place, place + end - index)
    return place + end - index
