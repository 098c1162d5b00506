"""The prompts of ``LLM``'s methods: texts, or tokens."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import RequestError

Prompt = str | list[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text or one list of token ids is a single prompt."""
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


def _no_prompt(given: object) -> RequestError:
    return RequestError(f"A prompt is a text or a list of token ids, got {type(given).__name__}.", "prompts")
