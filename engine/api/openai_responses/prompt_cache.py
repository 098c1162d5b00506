"""``prompt_cache_diagnostics``: whether the prompt of the response named for comparison was reused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.api.prompt_cache.diagnosis import Diagnosis
from engine.api.prompt_cache.fingerprint import Part

Reason = Literal[
    "model_changed", "tools_changed", "reasoning_effort_changed", "context_compacted", "input_changed"
]

_REASONS: Mapping[Part, Reason] = {
    "model": "model_changed",
    "tools": "tools_changed",
    "reasoning": "reasoning_effort_changed",
    "system": "input_changed",
    "messages": "input_changed",
}
"""OpenAI's other reasons never apply: prompts here do not depend on keys, formats, verbosity or tiers."""


class PromptCacheDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's field. ``unavailable``: the prompt was not reused, although the client changed nothing."""

    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]
    reason: Reason | UnsetType = UNSET
    cache_missed_tokens: int | UnsetType = UNSET
    comparison_reusable_tokens: int | UnsetType = UNSET


def told_diagnosis(diagnosis: Diagnosis, *, is_compacted: bool) -> PromptCacheDiagnostics:
    """Converts a diagnosis to OpenAI's terms. ``is_compacted``: the oldest messages were left out to fit the
    context."""
    match diagnosis.outcome:
        case "hit":
            return PromptCacheDiagnostics(type="cache_hit")
        case "not_found":
            return PromptCacheDiagnostics(type="comparison_response_not_found")
        case "unavailable":
            return PromptCacheDiagnostics(type="unavailable")
    assert diagnosis.changed is not None, "a miss has its reason"
    reason = _REASONS[diagnosis.changed]
    return PromptCacheDiagnostics(
        type="cache_miss",
        reason="context_compacted" if is_compacted and diagnosis.changed == "messages" else reason,
        cache_missed_tokens=diagnosis.missed_tokens,
        comparison_reusable_tokens=diagnosis.reusable_tokens,
    )
