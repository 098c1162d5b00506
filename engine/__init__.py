"""The V1-style engine: scheduler, paged KV cache, workers, processes and the HTTP server.

It knows only the names of jobs: a policy (``engine.core.policy``) decides what to do about a job.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.frontend.async_llm import AsyncLLM
    from engine.frontend.llm import LLM
    from engine.records.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "SamplingParams"]

_DOORS = {
    "LLM": "engine.frontend.llm",
    "AsyncLLM": "engine.frontend.async_llm",
    "SamplingParams": "engine.records.sampling_params",
}
"""Modules that define the public names, which are imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name not in _DOORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_DOORS[name]), name)
