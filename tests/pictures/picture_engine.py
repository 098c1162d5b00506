"""An engine that gets pixels with its requests, as from an API server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.frontend.llm import LLM
from engine.frontend.request_output import RequestOutput
from engine.records.media import PictureModel, PictureSize
from engine.records.messages import MediaSpan, RequestContext
from engine.records.sampling_params import SamplingParams
from tests.pictures.picture_folders import Picture, stored
from tests.worker.generation import random_tokens

SIZES: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 80}
Part = int | Picture
"""A number of text tokens, or a picture."""


def greedy(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def prompt_of(
    parts: Sequence[Part], model: PictureModel, pixels: Path, seed: int = 1
) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """The tokens and the pictures of a prompt; the pictures' pixels are written to a folder."""
    text, tokens, media = iter(random_tokens(1000, seed=seed)), list[int](), list[MediaSpan]()
    for part in parts:
        if isinstance(part, int):
            tokens += [next(text) for _ in range(part)]
        else:
            media.append(stored(part, len(tokens), pixels, model))
            tokens += model.token_ids(PictureSize(*part.shape[:2]))
    return tokens, tuple(media)


def run(llm: LLM) -> dict[str, RequestOutput]:
    """Runs all requests; returns the last output of each by its id."""
    outputs: dict[str, RequestOutput] = {}
    while llm.engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.engine.step()}
    llm.engine.check_invariants()
    return outputs


class PictureEngine:
    """Takes prompts with pictures and returns outputs."""

    def __init__(self, llm: LLM, pixels: Path) -> None:
        self.llm = llm
        self.pixels = pixels
        models = llm.engine.ready.media
        assert models is not None
        assert models.image is not None
        self.model = models.image

    def prompt(self, *parts: Part, seed: int = 1) -> tuple[list[int], tuple[MediaSpan, ...]]:
        return prompt_of(parts, self.model, self.pixels, seed)

    def add(
        self,
        name: str,
        prompt: tuple[list[int], tuple[MediaSpan, ...]],
        params: SamplingParams | None = None,
        **context: Any,
    ) -> None:
        tokens, media = prompt
        asked = RequestContext(media=media, **context)
        self.llm.engine.add_request(name, tokens, params or greedy(), asked)

    def run(self) -> dict[str, RequestOutput]:
        return run(self.llm)

    def ask(
        self, prompt: tuple[list[int], tuple[MediaSpan, ...]], params: SamplingParams | None = None
    ) -> RequestOutput:
        self.add("asked", prompt, params)
        return self.run()["asked"]


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@contextmanager
def picture_engine(folder: Path, pixels: Path, **options: Any) -> Iterator[PictureEngine]:
    with LLM(str(folder), **{"multiprocess": False, **SIZES, **options}) as llm:
        yield PictureEngine(llm, pixels)
