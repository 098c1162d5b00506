"""An engine that gets samples and pixels with its requests, as from an API server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from engine.frontend.llm import LLM
from engine.frontend.request_output import RequestOutput
from engine.records.media import MediaModels
from engine.records.messages import MediaSpan, RequestContext
from tests.audio import audio_folders
from tests.pictures import picture_folders
from tests.pictures.picture_engine import SIZES, greedy, run
from tests.worker.generation import random_tokens

Part = int | audio_folders.Clip | picture_folders.Picture
"""A number of text tokens, a clip, or a picture."""
Prompt = tuple[list[int], tuple[MediaSpan, ...]]


class AudioEngine:
    """Takes prompts with clips and pictures and returns outputs."""

    def __init__(self, llm: LLM, files: Path) -> None:
        self.llm = llm
        self.files = files
        models = llm.engine.ready.media
        assert models is not None
        self.models: MediaModels = models

    def prompt(self, *parts: Part, seed: int = 1) -> Prompt:
        """The tokens and the media of a prompt, whose files are written."""
        text, tokens, media = iter(random_tokens(1000, seed=seed)), list[int](), list[MediaSpan]()
        for part in parts:
            if isinstance(part, int):
                tokens += [next(text) for _ in range(part)]
                continue
            media.append(self._stored(part, len(tokens)))
            size = media[-1].size
            assert size is not None
            model = self.models.of(size.kind)
            assert model is not None
            tokens += model.token_ids(size)
        return tokens, tuple(media)

    def _stored(self, part: Any, offset: int) -> MediaSpan:
        if part.ndim == 1:
            assert self.models.audio is not None
            return audio_folders.stored(part, offset, self.files, self.models.audio)
        assert self.models.image is not None
        return picture_folders.stored(part, offset, self.files, self.models.image)

    def add(self, name: str, prompt: Prompt, num_tokens: int = 12) -> None:
        self.llm.engine.add_request(name, prompt[0], greedy(num_tokens), RequestContext(media=prompt[1]))

    def run(self) -> dict[str, RequestOutput]:
        return run(self.llm)

    def ask(self, prompt: Prompt, num_tokens: int = 12) -> RequestOutput:
        self.add("asked", prompt, num_tokens)
        return self.run()["asked"]


def clips_in(parts: Sequence[Part]) -> list[audio_folders.Clip]:
    return [part for part in _arrays(parts) if part.ndim == 1]


def pictures_in(parts: Sequence[Part]) -> list[picture_folders.Picture]:
    return [part for part in _arrays(parts) if part.ndim == 3]


def _arrays(parts: Sequence[Part]) -> list[Any]:
    return [part for part in parts if isinstance(part, np.ndarray)]


@contextmanager
def audio_engine(folder: Path, files: Path, **options: Any) -> Iterator[AudioEngine]:
    with LLM(
        str(folder), **{"multiprocess": False, **SIZES, "num_gpu_blocks_override": 120, **options}
    ) as llm:
        yield AudioEngine(llm, files)
