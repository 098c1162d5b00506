"""Runs transformers' own continuous batching."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

_POLL_S = 1.0
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    seconds: float
    num_outputs: list[int]
    """Tokens out of each request."""


def generate_by_transformers(
    model: Any,
    prompts: Sequence[list[int]],
    num_outputs: Sequence[int],
    limit_s: float,
    config: ContinuousBatchingConfig | None = None,
) -> PeerAnswer:
    """Generates greedily with a model of transformers, all requests at once; does not count its warm-up.

    ``config`` defaults to the library's. TimeoutError after ``limit_s`` seconds, RuntimeError if it gives up.
    """
    ends_at_s = time.monotonic() + limit_s
    greedy = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=-1, max_new_tokens=max(num_outputs)
    )
    counts: dict[str, int] = {}
    with model.continuous_batching_context_manager(
        generation_config=greedy,
        continuous_batching_config=config or ContinuousBatchingConfig(),
        timeout=_STOP_S,
    ) as manager:
        began_s = time.perf_counter()
        for number, (prompt, count) in enumerate(zip(prompts, num_outputs, strict=True)):
            manager.add_request(prompt, request_id=str(number), max_new_tokens=count)
        while len(counts) < len(prompts):
            result = manager.get_result(timeout=_POLL_S)
            if result is not None and result.is_finished():
                counts[result.request_id] = len(result.generated_tokens)
            elif not manager.is_running():
                raise RuntimeError("transformers' continuous batching gave up.")
            elif time.monotonic() > ends_at_s:
                manager.stop(timeout=_STOP_S, hard_stop=True)  # otherwise it finishes all begun requests
                raise TimeoutError(f"{len(counts)} of {len(prompts)} requests were done when time was over.")
        seconds = time.perf_counter() - began_s
    return PeerAnswer(seconds, [counts[str(number)] for number in range(len(prompts))])
