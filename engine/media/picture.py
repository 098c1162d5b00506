"""What API servers and the core tell each other of pictures."""

from __future__ import annotations

import msgspec


class PictureModel(msgspec.Struct, array_like=True, frozen=True):
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

    @property
    def factor(self) -> int:
        """Side of a token, in pixels: both sides of a picture are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def max_tokens(self) -> int:
        """The most tokens of one picture."""
        return max(1, self.max_pixels // self.factor**2)


class Pixels(msgspec.Struct, array_like=True, frozen=True):
    """Where the pixels of a picture are, in the size in which the model reads it: the bytes of
    [height, width, 3], red first, in a file that stays until the request ends."""

    path: str
    height: int
    width: int
