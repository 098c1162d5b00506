"""What API servers and the core tell each other of pictures."""

from __future__ import annotations

import msgspec


class PictureModel(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """How a model reads pictures: cut into square patches, of which a square of neighbors is a token."""

    token_id: int
    """Stands in the prompt in place of each token of a picture."""
    patch_size: int
    """Side of a patch, in pixels."""
    merge_size: int
    """Side of the square of patches that becomes one token."""
    min_pixels: int
    """A smaller picture is enlarged."""
    max_pixels: int
    """A larger picture is reduced."""
    max_pictures: int
    """The most pictures of a prompt; 0: none are taken."""
    max_edge: int = 0
    """Longest side of a picture, in pixels, where a model limits sides and not the number of pixels."""
    row_end_id: int | None = None
    """A token behind each row of a picture; None: rows follow each other."""
    end_id: int | None = None
    """The token in its place behind the last row."""

    @property
    def factor(self) -> int:
        """Side of a token, in pixels: both sides of a picture are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def max_tokens(self) -> int:
        """The most tokens of one picture."""
        if not self.max_edge:
            return max(1, self.max_pixels // self.factor**2)
        side = -(-self.max_edge // self.factor) * self.factor
        return self.num_tokens(side, side)

    def num_tokens(self, height: int, width: int) -> int:
        """Number of tokens of a picture of this size, those behind rows included."""
        return (height // self.factor) * (width // self.factor + (self.row_end_id is not None))

    def token_ids(self, height: int, width: int) -> list[int]:
        """The tokens of a picture of this size: ``token_id`` where its embeddings go."""
        rows, columns = height // self.factor, width // self.factor
        if self.row_end_id is None or self.end_id is None:
            return [self.token_id] * (rows * columns)
        row = [*[self.token_id] * columns, self.row_end_id]
        return [*row * (rows - 1), *row[:-1], self.end_id]


class Pixels(msgspec.Struct, array_like=True, frozen=True):
    """Where the pixels of a picture are, in the size in which the model reads it: the bytes of
    [height, width, 3], red first, in a file that stays until the request ends."""

    path: str
    height: int
    width: int
