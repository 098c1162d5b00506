"""What the process tests share: waiting for a process with a deadline, requests without a tokenizer, a policy."""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass
from pathlib import Path

from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.messages import EngineCoreRequest, Signal, ToolGapStarted, TurnReceipt
from engine.policy import FcfsPolicy, Pin, PolicyContext, SchedulingPolicy
from engine.sampling_params import SamplingParams

GONE_WITHIN_S = 2.0
"""The promise: this long after the other side died."""


def config(trace_path: str | None = None) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="fake"), cache=CacheConfig(num_gpu_blocks_override=64), trace_path=trace_path
    )


def core_request(request_id: str, *, num_prompt_tokens: int = 20, max_tokens: int = 900) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, [1] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens), time.monotonic()
    )


def has_gone(pid: int, within_s: float = GONE_WITHIN_S) -> bool:
    """Whether a process, not necessarily our child, ends in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


class SignalPolicy(FcfsPolicy):
    """Answers every signal, and writes down that it was closed."""

    wants_signals = True

    def __init__(self, closed_mark: Path | None) -> None:
        self._closed_mark = closed_mark

    def on_signal(self, signal: Signal, now: float) -> tuple[TurnReceipt | None, list[Pin]]:
        if not isinstance(signal, ToolGapStarted):
            return None, []
        if signal.job_id == "bad":
            raise ValueError("a bad job")
        return TurnReceipt(request_id=signal.request_id, job_id=signal.job_id, turn=1, reason="test"), []

    def close(self) -> None:
        if self._closed_mark is not None:
            self._closed_mark.write_text("closed")


@dataclass(frozen=True)
class SignalPolicyFactory:
    closed_mark: Path | None = None

    def __call__(self, context: PolicyContext) -> SchedulingPolicy:
        return SignalPolicy(self.closed_mark)
