"""Helpers of the process tests: waiting with a deadline, requests without a tokenizer, policies."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig, TraceConfig
from engine.core.policy import FcfsPolicy, Pin, PinEnd, PolicyContext, SchedulingPolicy
from engine.core.request import Request
from engine.records.messages import EngineCoreRequest, JobRef, Signal, ToolGapStarted, TurnReceipt
from engine.records.sampling_params import SamplingParams

GONE_WITHIN_S = 2.0
"""The promise: a process ends within this time after the other side died."""
WITHIN_S = 90.0
"""A generous timeout: what has not happened by then never happens."""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"


def engine_states(url: str) -> list[str]:
    """The states of a server's cores, by number."""
    data = httpx.get(f"{url}/engines", timeout=60).json()["data"]
    return [engine["state"] for engine in data]


def config(trace_path: str | None = None) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="fake"),
        cache=CacheConfig(num_gpu_blocks_override=64),
        trace=TraceConfig(trace_path=trace_path),
    )


def core_request(
    request_id: str, *, num_prompt_tokens: int = 20, max_tokens: int = 900, job: JobRef | None = None
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, [1] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens), time.monotonic(), job=job
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


def freeze(pid: int) -> None:
    """Stops a child of ours with SIGSTOP; returns once it has really stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


class SignalPolicy(FcfsPolicy):
    """Answers every signal, refuses the job "bad", and records that it was closed."""

    wants_signals = True

    def __init__(self, closed_mark: Path | None) -> None:
        self._closed_mark = closed_mark
        self._jobs: dict[str, str] = {}

    def on_arrival(self, request: Request, now: float) -> None:
        if request.job is not None and request.job.job_id == "bad":
            raise ValueError("a bad job")
        if request.job is not None:
            self._jobs[request.request_id] = request.job.job_id or "inferred"

    def on_signal(self, signal: Signal, now: float) -> TurnReceipt | None:
        if not isinstance(signal, ToolGapStarted):
            return None
        if signal.request_id == "bad":
            raise ValueError("a bad job")
        job_id = self._jobs[signal.request_id]
        return TurnReceipt(request_id=signal.request_id, job_id=job_id, turn=1, reason="test")

    def close(self) -> None:
        if self._closed_mark is not None:
            self._closed_mark.write_text("closed")


@dataclass(frozen=True)
class SignalPolicyFactory:
    closed_mark: Path | None = None

    def __call__(self, context: PolicyContext) -> SchedulingPolicy:
        return SignalPolicy(self.closed_mark)


class PinningPolicy(FcfsPolicy):
    """Pins every turn for a while, and reports over a named pipe how long each pin was held."""

    def __init__(self, hold_s: float, told: Path) -> None:
        self._hold_s = hold_s
        self._told = told
        self._pins: list[Pin] = []

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        pin = Pin(1, "job", request.request_id, request.block_hashes[:1], now + self._hold_s)
        self._pins.append(pin)
        return pin

    def due(self, now: float) -> Iterator[tuple[Pin, PinEnd]]:
        return iter([(pin, PinEnd.EXPIRED) for pin in self._pins if pin.deadline_s <= now])

    def next_due_s(self) -> float | None:
        return min((pin.deadline_s for pin in self._pins), default=None)

    def on_pin_ended(self, pin: Pin, cause: PinEnd, now: float, by: str | None = None) -> None:
        self._pins.remove(pin)
        self._told.write_text(str(now - pin.deadline_s + self._hold_s))

    def pins(self) -> list[Pin]:
        return self._pins


@dataclass(frozen=True)
class PinningPolicyFactory:
    hold_s: float
    told: Path

    def __call__(self, context: PolicyContext) -> SchedulingPolicy:
        return PinningPolicy(self.hold_s, self.told)
