"""A pipeline without a model, with OpenVINO GenAI's names: for any prompt it generates the bytes of TEXT over
and over, one per step, from the step that finishes the prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.benchmarks.openvino_stand_in.openvino import Tensor

TEXT = "né".encode()
"""The second character takes two tokens."""
PROMPT_TOKENS_A_STEP = 32


class GenerationStatus(Enum):
    RUNNING = auto()
    FINISHED = auto()
    CANCEL = auto()


class GenerationFinishReason(Enum):
    NONE = auto()
    STOP = auto()
    LENGTH = auto()


class SchedulerConfig(SimpleNamespace):
    pass


@dataclass
class GenerationConfig:
    max_new_tokens: int = 0
    ignore_eos: bool = False
    do_sample: bool = True


class Tokenizer:
    def decode(self, batch: Sequence[Sequence[int]]) -> list[str]:
        return [bytes(tokens).decode(errors="replace") for tokens in batch]


@dataclass
class GenerationOutput:
    generated_ids: list[int]
    finish_reason: GenerationFinishReason


@dataclass
class GenerationHandle:
    """A request. Without ``ignore_eos`` it ends after one TEXT."""

    num_prompt_tokens: int
    config: GenerationConfig
    status: GenerationStatus = GenerationStatus.RUNNING
    num_tokens: int = 0
    unread: deque[GenerationOutput] = field(default_factory=deque)

    def get_status(self) -> GenerationStatus:
        return self.status

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, GenerationOutput]:
        return {0: self.unread.popleft()}

    def cancel(self) -> None:
        self.status = GenerationStatus.CANCEL

    def step(self) -> None:
        self.num_prompt_tokens -= PROMPT_TOKENS_A_STEP
        if self.num_prompt_tokens > 0:
            return
        token = TEXT[self.num_tokens % len(TEXT)]
        self.num_tokens += 1
        reason = GenerationFinishReason.NONE
        if self.num_tokens == self.config.max_new_tokens:
            reason = GenerationFinishReason.LENGTH
        elif self.num_tokens == len(TEXT) and not self.config.ignore_eos:
            reason = GenerationFinishReason.STOP
        if reason is not GenerationFinishReason.NONE:
            self.status = GenerationStatus.FINISHED
        self.unread.append(GenerationOutput([token], reason))


class ContinuousBatchingPipeline:
    def __init__(
        self, folder: str, scheduler: SchedulerConfig, device: str, properties: dict[str, object]
    ) -> None:
        self._handles: list[GenerationHandle] = []

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    def add_request(self, request_id: int, prompt: Tensor, config: GenerationConfig) -> GenerationHandle:
        if prompt.data.shape[1] == 0:
            raise RuntimeError("Prompt length cannot be 0")
        handle = GenerationHandle(prompt.data.shape[1], config)
        self._handles.append(handle)
        return handle

    def step(self) -> None:
        self._handles = [each for each in self._handles if each.status is GenerationStatus.RUNNING]
        for handle in self._handles:
            handle.step()
