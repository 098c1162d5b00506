"""Messages about pictures and audio between API servers and the core."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class MediaKind(StrEnum):
    """What a part of a prompt is, besides text. The values are V1's names."""

    IMAGE = "image"
    AUDIO = "audio"

    @property
    def noun(self) -> str:
        """The word for one of them in messages."""
        return {MediaKind.IMAGE: "picture", MediaKind.AUDIO: "clip"}[self]


class PictureSize(msgspec.Struct, array_like=True, frozen=True, tag="picture"):
    """The size in which a model reads a picture. Its file has [height, width, 3] bytes in RGB order."""

    height: int
    width: int

    @property
    def kind(self) -> MediaKind:
        return MediaKind.IMAGE

    @property
    def num_bytes(self) -> int:
        """Size of its file."""
        return self.height * self.width * 3


class ClipSize(msgspec.Struct, array_like=True, frozen=True, tag="clip"):
    """The length of an audio clip at the model's sampling rate. Its file has [num_samples] float32, mono."""

    num_samples: int

    @property
    def kind(self) -> MediaKind:
        return MediaKind.AUDIO

    @property
    def num_bytes(self) -> int:
        """Size of its file."""
        return self.num_samples * 4


MediaSize = PictureSize | ClipSize


class PictureModel(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, tag="picture"):
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
    max_count: int
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
        return self.num_tokens(PictureSize(side, side))

    def num_tokens(self, size: MediaSize) -> int:
        """Number of tokens of a picture of this size, including those that follow its rows."""
        assert isinstance(size, PictureSize)
        return (size.height // self.factor) * (size.width // self.factor + (self.row_end_id is not None))

    def token_ids(self, size: MediaSize) -> list[int]:
        """The tokens of a picture of this size: ``token_id`` at the places of its embeddings."""
        assert isinstance(size, PictureSize)
        rows = size.height // self.factor
        columns = size.width // self.factor
        if self.row_end_id is None or self.end_id is None:
            return [self.token_id] * (rows * columns)
        row = [*[self.token_id] * columns, self.row_end_id]
        return [*row * (rows - 1), *row[:-1], self.end_id]

    def fault_of(self, size: MediaSize) -> str | None:
        """What is wrong with a picture of this size; None: nothing."""
        assert isinstance(size, PictureSize)
        sides = size.height, size.width
        if min(sides) < 1 or any(side % self.factor for side in sides):
            return f"is {size.width}x{size.height} pixels; both sides must be multiples of {self.factor}"
        return None

    @property
    def settings(self) -> tuple[int, ...]:
        """What the pixels of a file depend on besides the file."""
        return self.min_pixels, self.max_pixels, self.max_edge


class TokenRule(StrEnum):
    """How many embeddings an audio encoder makes of a clip."""

    HALVED_TWICE = "halved_twice"
    """Two layers, a convolution and a mean, halve the number of frames: Qwen2-Audio, Qwen2.5-Omni."""
    WINDOWS = "windows"
    """As many for each window begun: Voxtral."""
    CHUNKS = "chunks"
    """Three convolutions halve the number of frames of each chunk of 100: Qwen3-Omni."""
    WHOLE_FRAMES = "whole_frames"
    """Two convolutions halve the number of frames that lie within the clip and half a frame of silence before
    it: Gemma 4."""


class AudioModel(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, tag="audio"):
    """How a model reads audio: as one sequence of samples, which it cuts into frames."""

    token_id: int
    """The id that represents each token of a clip in the prompt."""
    sampling_rate: int
    """Samples for each second."""
    hop_length: int
    """Samples for each frame."""
    rule: TokenRule
    """Number of tokens for a number of frames."""
    max_samples: int
    """Maximum length of a clip."""
    max_count: int
    """Maximum number of clips in a prompt; 0: audio is not supported."""
    window: int = 0
    """Samples of a window, for TokenRule.WINDOWS."""
    window_tokens: int = 0
    """Tokens of a window, for TokenRule.WINDOWS."""
    frame_length: int = 0
    """Samples of a frame, for TokenRule.WHOLE_FRAMES."""
    begin_id: int | None = None
    """A token before each clip that the model's processor adds to what its template writes; None: none."""
    end_id: int | None = None
    """The same after it."""

    @property
    def min_samples(self) -> int:
        """Minimum length of a clip: a tenth of a second, of which each rule makes a token or more."""
        return self.sampling_rate // 10

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of one clip."""
        return self.num_tokens(ClipSize(self.max_samples))

    def num_tokens(self, size: MediaSize) -> int:
        """Number of tokens of a clip, as the processors of transformers compute it."""
        assert isinstance(size, ClipSize)
        match self.rule:
            case TokenRule.HALVED_TWICE:
                return (_halved(-(-size.num_samples // self.hop_length)) - 2) // 2 + 1
            case TokenRule.WINDOWS:
                return -(-size.num_samples // self.window) * self.window_tokens
            case TokenRule.CHUNKS:
                chunks, frames = divmod(size.num_samples // self.hop_length, 100)
                return chunks * 13 + _halved(_halved(_halved(frames)))
            case TokenRule.WHOLE_FRAMES:
                num_after = size.num_samples + self.frame_length // 2 - (self.frame_length + 1)
                return _halved(_halved(num_after // self.hop_length + 1))

    def token_ids(self, size: MediaSize) -> list[int]:
        """The tokens of a clip: ``token_id`` for each of its embeddings."""
        assert isinstance(size, ClipSize)
        return [self.token_id] * self.num_tokens(size)

    def fault_of(self, size: MediaSize) -> str | None:
        """What is wrong with a clip of this length; None: nothing."""
        assert isinstance(size, ClipSize)
        if self.min_samples <= size.num_samples <= self.max_samples:
            return None
        has, least, most = (
            each / self.sampling_rate for each in (size.num_samples, self.min_samples, self.max_samples)
        )
        told = f"more than {most:g}" if has > most else f"{has:.2g}"
        return f"has {told} s; this model reads clips of {least:g} s to {most:g} s"

    @property
    def settings(self) -> tuple[int, ...]:
        """What the samples of a file depend on besides the file."""
        return (self.sampling_rate, self.max_samples)


def _halved(frames: int) -> int:
    """The number of outputs of a convolution of stride two."""
    return (frames - 1) // 2 + 1


MediaModel = PictureModel | AudioModel


class MediaModels(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """How a model reads each kind of media; None: not at all. At least one is set."""

    image: PictureModel | None = None
    audio: AudioModel | None = None

    def of(self, kind: MediaKind) -> MediaModel | None:
        """How it reads this kind."""
        return self.image if kind is MediaKind.IMAGE else self.audio

    @property
    def all(self) -> dict[MediaKind, MediaModel]:
        """The kinds that it reads."""
        found = {kind: self.of(kind) for kind in MediaKind}
        return {kind: model for kind, model in found.items() if model is not None}

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of one picture or clip."""
        return max(model.max_tokens for model in self.all.values())

    @property
    def nouns(self) -> str:
        """Its kinds, in words: "pictures and clips"."""
        return " and ".join(f"{kind.noun}s" for kind in self.all)
