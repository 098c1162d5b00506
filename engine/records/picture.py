"""Messages about pictures between API servers and the core."""

from __future__ import annotations

import msgspec


class PictureModel(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """How a model reads pictures: it cuts them into square patches, and a square of neighboring patches is a
    token."""

    token_id: int
    """The id that represents each token of a picture in the prompt."""
    patch_size: int
    """Side of a patch, in pixels."""
    merge_size: int
    """Side of the square of patches that becomes one token."""
    min_pixels: int
    """A smaller picture is enlarged."""
    max_pixels: int
    """A larger picture is reduced."""
    max_pictures: int
    """Maximum number of pictures in a prompt; 0: pictures are not supported."""
    max_edge: int = 0
    """Longest side of a picture, in pixels, if the model limits sides instead of the number of pixels; else
    0."""
    row_end_id: int | None = None
    """A token that follows each row of a picture; None: rows follow each other directly."""
    end_id: int | None = None
    """The token that follows the last row, instead of ``row_end_id``."""

    @property
    def factor(self) -> int:
        """Side of a token, in pixels: both sides of a resized picture are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of one picture."""
        if not self.max_edge:
            return max(1, self.max_pixels // self.factor**2)
        side = -(-self.max_edge // self.factor) * self.factor
        return self.num_tokens(side, side)

    def num_tokens(self, height: int, width: int) -> int:
        """Number of tokens of a picture of this size, including those that follow its rows."""
        return (height // self.factor) * (width // self.factor + (self.row_end_id is not None))

    def token_ids(self, height: int, width: int) -> list[int]:
        """The tokens of a picture of this size: ``token_id`` at the places of its embeddings."""
        rows = height // self.factor
        columns = width // self.factor
        if self.row_end_id is None or self.end_id is None:
            return [self.token_id] * (rows * columns)
        row = [*[self.token_id] * columns, self.row_end_id]
        return [*row * (rows - 1), *row[:-1], self.end_id]


class Pixels(msgspec.Struct, array_like=True, frozen=True):
    """Locates the pixels of a picture, in the size in which the model reads it: a file of [height, width, 3]
    bytes in RGB order, which exists until the request ends."""

    path: str
    height: int
    width: int
