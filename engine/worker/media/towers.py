"""The encoders of one model: of pictures, of audio, or of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.records.media import ClipSize, MediaModels, MediaSize
from engine.worker.media.audio_tower import AudioTower, Clip
from engine.worker.media.vision_tower import Picture, VisionTower

Medium = Picture | Clip


@dataclass(frozen=True, slots=True)
class Towers:
    """The encoders of a model; at least one is set."""

    vision: VisionTower | None = None
    audio: AudioTower | None = None

    @property
    def models(self) -> MediaModels:
        """How the model reads each kind."""
        vision = self.vision
        audio = self.audio
        return MediaModels(None if vision is None else vision.model, None if audio is None else audio.model)

    def encode(self, media: Sequence[Medium]) -> list[torch.Tensor]:
        """The decoder's inputs in place of the tokens of each picture and clip: see ``VisionTower.encode``;
        clips have no additions."""
        outputs: list[torch.Tensor | None] = [None] * len(media)
        pictures = [index for index, each in enumerate(media) if each.ndim == 3]
        if pictures:
            assert self.vision is not None
            encoded = self.vision.encode([media[index] for index in pictures])  # type: ignore[misc]
            for index, output in zip(pictures, encoded, strict=True):
                outputs[index] = output
        for index, each in enumerate(media):
            if each.ndim == 1:
                assert self.audio is not None
                outputs[index] = self.audio.encode(each)  # type: ignore[arg-type]
        return [output for output in outputs if output is not None]

    def warm_up(self) -> None:
        """Encode the largest picture and the longest clip once, so that the KV pool leaves that much of the
        device's memory."""
        if self.vision is not None:
            side = max(1, math.isqrt(self.vision.model.max_pixels) // self.vision.model.factor)
            size = side * self.vision.model.factor
            self.vision.encode([np.zeros((size, size, 3), dtype=np.uint8)])
        if self.audio is not None:
            self.audio.encode(np.zeros(self.audio.model.max_samples, dtype=np.float32))


def read_file(path: str, size: MediaSize) -> Medium:
    """The pixels or samples of a file. Raises OSError, or ValueError if the file has another size."""
    if isinstance(size, ClipSize):
        samples: Clip = np.fromfile(path, dtype=np.float32)
        return samples.reshape(size.num_samples)
    pixels: Picture = np.fromfile(path, dtype=np.uint8)
    return pixels.reshape(size.height, size.width, 3)
