"""The prompts of ``LLM``'s methods: texts, or tokens, perhaps with pictures and clips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError
from engine.records.media import MediaKind

Prompt = str | list[int]

_FIELDS = ("prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs")


@dataclass(frozen=True, slots=True)
class GivenMedia:
    """A picture or clip as it was passed."""

    kind: MediaKind
    value: Any
    where: str
    """Its path in the input, for errors."""


@dataclass(frozen=True, slots=True)
class PromptInput:
    """A prompt with a placeholder for each of its pictures and clips."""

    prompt: Prompt
    media: Sequence[GivenMedia] = ()
    """Its pictures and clips as they were passed."""
    text: str | None = None
    """The prompt's text, if it was passed as text."""


GivenPrompt = Prompt | Mapping[str, Any] | PromptInput
"""A mapping has vLLM's fields: ``prompt`` or ``prompt_token_ids``, and ``multi_modal_data``."""


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns a list of prompts; a text or one list of token ids is a single prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise _no_prompt(prompts)
    if prompts and all(isinstance(item, int) for item in prompts):
        return [[item for item in prompts if isinstance(item, int)]]
    many: list[Prompt] = []
    for prompt in prompts:
        if not isinstance(prompt, str | list):
            raise _no_prompt(prompt)
        many.append(prompt)
    return many


def as_inputs(prompts: GivenPrompt | Sequence[GivenPrompt]) -> list[PromptInput]:
    """Like ``as_prompts``, also for mappings, which may have media. RequestError for an unknown field."""
    if isinstance(prompts, Mapping | PromptInput):
        return [_input(prompts, "prompts")]
    if not _holds_mappings(prompts):
        return [_input(prompt, "prompts") for prompt in as_prompts(prompts)]  # type: ignore[arg-type]
    return [_input(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]


def _holds_mappings(prompts: object) -> bool:
    return isinstance(prompts, Sequence) and any(isinstance(each, Mapping | PromptInput) for each in prompts)


def _input(given: object, where: str) -> PromptInput:
    if isinstance(given, PromptInput):
        return given
    if not isinstance(given, Mapping):
        (only,) = as_prompts([given] if isinstance(given, list) else given)  # type: ignore[arg-type]
        return PromptInput(only, text=only if isinstance(only, str) else None)
    for name, value in given.items():
        if name not in _FIELDS or (name == "mm_processor_kwargs" and value):
            raise RequestError(f"{where} must not have {name!r} here.", where)
    text = given.get("prompt")
    token_ids = given.get("prompt_token_ids")
    prompt: object = token_ids if text is None else text
    if not isinstance(prompt, str | list):
        raise RequestError(f"{where} needs prompt, a text, or prompt_token_ids.", where)
    media = _media(given.get("multi_modal_data") or {}, f"{where}.multi_modal_data")
    return PromptInput(prompt, media, text if isinstance(text, str) else None)


def _media(data: object, where: str) -> list[GivenMedia]:
    if not isinstance(data, Mapping):
        raise RequestError(f"{where} must be a mapping.", where)
    found = []
    for name, given in data.items():
        kind = next((each for each in MediaKind if each == name), None)
        if kind is None:
            raise RequestError(f"{where} has {str(name)[:50]!r}; this engine takes image and audio.", where)
        many = given if _are_many(given, kind) else [given]
        found += [GivenMedia(kind, each, f"{where}.{kind}[{index}]") for index, each in enumerate(many)]
    return found


def _are_many(given: object, kind: MediaKind) -> bool:
    """Whether a value is several pictures or clips. A clip may be a pair, of samples and their rate."""
    return isinstance(given, list) or (kind is MediaKind.IMAGE and isinstance(given, tuple))


def _no_prompt(given: object) -> RequestError:
    return RequestError(f"A prompt is a text or a list of token ids, got {type(given).__name__}.", "prompts")
