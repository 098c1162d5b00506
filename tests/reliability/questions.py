"""Random questions, and the answer of a plain engine to each of them alone."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.frontend.llm import LLM
from engine.frontend.request_output import CompletionOutput
from engine.records.adapters import LoRARequest
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from engine.worker.loading.tiny_models import make_model_folder
from tests.audio.audio_folders import make_audio_folder
from tests.audio.sounds import input_audio, wav
from tests.media.pictures import image_url, png
from tests.pictures.picture_folders import FACTOR, make_picture_folder
from tests.reliability.operators import World
from tests.worker.conftest import VARIANTS
from tests.worker.lora.made_adapters import save_adapter

OMNI_FAMILIES = ("qwen2_5_omni_thinker",)
PICTURE_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "mistral3")
MEDIA_FAMILIES = (*PICTURE_FAMILIES, *OMNI_FAMILIES)
MAX_MODEL_LEN = 480
NUM_CHAINS = 3
TURNS_OF_A_CHAIN = 4
CLOSE = 2e-2
"""How much log-probabilities may differ: a batch sums in another order."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["one", "another"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "seed": 3, "n": 2, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 1, "structured_outputs": {"json": SCHEMA}},
)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt of tokens, or a conversation with pictures and clips, and how to sample its answer."""

    job_id: str
    sampling: dict[str, Any]
    prompt: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    as_tokens: bool = False
    """Whether the prompt of tokens is answered with tokens only."""

    @property
    def route(self) -> str:
        if self.as_tokens:
            return "/inference/v1/generate"
        return "/v1/completions" if self.messages is None else "/v1/chat/completions"

    @property
    def body(self) -> dict[str, Any]:
        if self.as_tokens:
            return {"token_ids": self.prompt, "job_id": self.job_id, "sampling_params": self.sampling}
        if self.messages is None:
            return {"prompt": self.prompt, "job_id": self.job_id, **self.sampling}
        fields = dict(self.sampling)
        if "logprobs" in fields:
            fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
        kept = {"prompt_cache_options": {"ttl": "30m"}}
        return {"messages": self.messages, "job_id": self.job_id, **kept, **fields}

    def alone(self, engine: LLM, adapter: LoRARequest | None) -> list[CompletionOutput]:
        """What the engine answers to this question alone."""
        fields = dict(self.sampling)
        constraint = fields.pop("structured_outputs", None)
        if constraint is not None:
            fields["structured_outputs"] = StructuredOutputsParams(**constraint)
        params = SamplingParams(**fields)
        if self.messages is not None:
            (output,) = engine.chat(self.messages, params, use_tqdm=False, lora_request=adapter)
        else:
            assert self.prompt is not None
            (output,) = engine.generate([self.prompt], params, use_tqdm=False, lora_request=adapter)
        return output.outputs

    def check(self, answer: dict[str, Any], expected: list[CompletionOutput], what: str) -> None:
        """Raises AssertionError if the answer has other tokens, texts or log-probabilities."""
        choices = answer["choices"]
        what = f"{what}: {self}"
        token_ids = [list(each.token_ids) for each in expected]
        assert [choice["token_ids"] for choice in choices] == token_ids, what
        if not self.as_tokens:
            assert [self._text(choice) for choice in choices] == [each.text for each in expected], what
        for choice, each in zip(choices, expected, strict=True):
            if each.logprobs is not None:
                alone = [position.chosen.logprob for position in each.logprobs]
                assert self._logprobs(choice) == pytest.approx(alone, abs=CLOSE), what

    def _text(self, choice: dict[str, Any]) -> str:
        text: str | None = choice["text"] if self.messages is None else choice["message"]["content"]
        return text or ""

    def _logprobs(self, choice: dict[str, Any]) -> list[float]:
        if self.as_tokens or self.messages is not None:
            return [position["logprob"] for position in choice["logprobs"]["content"]]
        logprobs: list[float] = choice["logprobs"]["token_logprobs"]
        return logprobs


class AloneWorld(World):
    """Chains of questions, each with the previous one as prefix, and a plain engine's answer to each."""

    num_questions = NUM_CHAINS * TURNS_OF_A_CHAIN

    def __init__(
        self,
        base: Path,
        random: Random,
        family: str,
        quantization: str | None,
        *,
        has_adapters: bool,
        closing: ExitStack,
    ) -> None:
        self._quantization = quantization
        self._options: dict[str, Any] = {"enable_lora": True} if has_adapters else {}
        self._closing = closing
        self.folders = [_folder(base, name, family, seed) for seed, name in enumerate(("old", "new"))]
        self.adapters: list[Path] = []
        if has_adapters:
            self.adapters = [save_adapter(self.folders[0], base / f"adapter{seed}", seed) for seed in (0, 1)]
        shown = partial(_shown, hears=family in OMNI_FAMILIES)
        chains = (shown if family in MEDIA_FAMILIES else _spelled, _spelled)
        self.questions = [
            question
            for number in range(NUM_CHAINS)
            for question in chains[number % 2](random, f"job{number}")
        ]
        self._engines: dict[Path, LLM] = {}
        self._expected: dict[tuple[Path, Path | None, int], list[CompletionOutput]] = {}

    def route(self, question: int) -> str:
        return self.questions[question].route

    def body(self, question: int) -> dict[str, Any]:
        return self.questions[question].body

    def check(self, weights: Path, adapter: Path | None, question: int, answer: dict[str, Any]) -> None:
        key = weights, adapter, question
        if key not in self._expected:
            request = None if adapter is None else LoRARequest(adapter.name, 1, str(adapter))
            self._expected[key] = self.questions[question].alone(self._engine(weights), request)
        what = f"weights {weights.name}, adapter {adapter}, question {question}"
        self.questions[question].check(answer, self._expected[key], what)

    def _engine(self, weights: Path) -> LLM:
        if weights not in self._engines:
            engine = LLM(
                str(weights),
                multiprocess=False,
                num_gpu_blocks_override=100,
                max_model_len=MAX_MODEL_LEN,
                enable_prefix_caching=False,
                quantization=self._quantization,
                **self._options,
            )
            self._engines[weights] = self._closing.enter_context(engine)
        return self._engines[weights]


def _folder(base: Path, name: str, family: str, seed: int) -> Path:
    if family not in MEDIA_FAMILIES:
        return make_model_folder(
            base / name, seed=seed, **{**VARIANTS[family], "max_position_embeddings": 2048}
        )
    texts = make_model_folder(base / f"{name}-texts", seed=seed)
    make = make_audio_folder if family in OMNI_FAMILIES else make_picture_folder
    return make(base / name, family, texts, seed=seed)


def _spelled(random: Random, job_id: str) -> list[Question]:
    """The turns of a job: each prompt continues the previous one."""
    prompt = [random.randrange(5, 250) for _ in range(random.choice((20, 70, 130)))]
    turns = []
    for number in range(TURNS_OF_A_CHAIN):
        prompt = [*prompt, *(random.randrange(5, 250) for _ in range(random.randrange(5, 60)))]
        turns.append(Question(job_id, _sampling(random), prompt=prompt, as_tokens=number % 2 == 1))
    return turns


def _shown(random: Random, job_id: str, *, hears: bool) -> list[Question]:
    """The turns of a job, most of which show a picture more, or play a clip if the model ``hears``."""
    messages: list[dict[str, Any]] = []
    turns = []
    for number in range(TURNS_OF_A_CHAIN):
        width, height = (FACTOR * random.randrange(2, 8) for _ in range(2))
        medium = image_url(png(width, height, seed=random.randrange(4)))
        if hears and random.random() < 0.6:
            medium = input_audio(wav(random.randrange(1, 20) / 10, seed=random.randrange(4)))
        text = {"type": "text", "text": "look " * random.randrange(1, 12)}
        parts = [text, medium] if random.random() < 0.8 else [text]
        messages = [*messages, {"role": "user", "content": parts}]
        turns.append(Question(job_id, _sampling(random), messages=messages))
        messages = [*messages, {"role": "assistant", "content": f"seen {number}"}]
    return turns


def _sampling(random: Random) -> dict[str, Any]:
    way = random.choice(WAYS)
    length = {"max_tokens": 40} if "structured_outputs" in way else {"max_tokens": 8, "ignore_eos": True}
    return {**length, **way}
