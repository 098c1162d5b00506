"""The V1-style engine: scheduler, paged KV cache, workers, processes and the HTTP server.

Knows nothing of jobs beyond their names: what to do about a job is a policy's (``engine.core.policy``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.frontend.async_llm import AsyncLLM
    from engine.frontend.llm import LLM
    from engine.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "SamplingParams"]

_DOORS = {
    "LLM": "engine.frontend.llm",
    "AsyncLLM": "engine.frontend.async_llm",
    "SamplingParams": "engine.sampling_params",
}
"""Where the public names are defined. They are imported when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _DOORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_DOORS[name]), name)
