"""OpenAI's options of the prompt cache: how long to keep a prompt, and what to compare it with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.api.prompt_cache.lifetime import checked_lifetime_s, lifetime_s

PromptCacheRetention = Literal["in_memory", "in-memory", "24h"]


class PromptCacheOptions(BaseModel):
    """``prompt_cache_options``. Every prefix is cached here, so ``mode`` and breakpoints change
    nothing."""

    model_config = ConfigDict(extra="allow")

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: str | None = None
    comparison_response_id: Annotated[str, Field(max_length=128)] | None = None
    """The response whose prompt should have been reused: diagnostics say whether it was."""
    prewarm: bool | None = None
    """Only prefill the prompt, and so cache it."""


def asked_ttl_s(options: PromptCacheOptions | None, retention: PromptCacheRetention | None) -> float | None:
    """How long the client asks to keep the prompt; None if unspecified."""
    if options is not None and options.ttl is not None:
        return checked_lifetime_s(options.ttl, "prompt_cache_options.ttl")
    return lifetime_s(retention or "")  # "in_memory" is no lifetime
