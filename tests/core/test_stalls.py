"""A core that can go on does so at once: it pauses only while nothing has changed."""

from __future__ import annotations

import time

import pytest

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicyFactory
from engine.clock import MonotonicClock
from engine.core.policy import PolicyFactory, priority
from engine.core_process import engine_core
from engine.core_process.engine_core import EngineCore
from engine.frontend.llm import engine_config
from engine.records.messages import EngineCoreRequest, JobRef
from engine.records.sampling_params import SamplingParams
from engine.testing import FakeExecutorFactory

STALL_S = 5.0
"""Replaces the real pause, so that a single one is noticed."""


class Room:
    """A core with five blocks of 16 tokens."""

    def __init__(self, policy: PolicyFactory, *, async_scheduling: bool) -> None:
        config = engine_config(
            "fake",
            num_gpu_blocks_override=6,
            long_prefill_token_threshold=15 if policy is priority else 0,
            scheduler_reserve_full_isl=False,
            async_scheduling=async_scheduling,
        )
        self.core = EngineCore(config, FakeExecutorFactory(max_model_len=80), policy, MonotonicClock())
        self.ended: list[str] = []

    def add(
        self, name: str, prompt: list[int], *, num_tokens: int, rank: int = 0, job: str | None = None
    ) -> None:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        told = JobRef(job) if job is not None else None
        core = self.core
        request = EngineCoreRequest(f"{name}-0", prompt, params, core.now(), priority=rank, job=told)
        assert not core.add_request(request)

    def step(self) -> None:
        assert self.core.wait_for_work()
        told = self.core.step()
        self.ended += [each.request_id for each in (told.outputs if told else []) if each.finished]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("policy", [priority, ContinuumPolicyFactory(ContinuumConfig())])
def test_nobody_waits_when_blocks_have_just_come_free(
    policy: PolicyFactory, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first admitted request repeatedly finds no block and preempts itself: all requests end without a
    pause."""
    monkeypatch.setattr(engine_core, "STALLED_RETRY_S", STALL_S)
    room = Room(policy, async_scheduling=async_scheduling)
    old = [7] * 20
    room.add("old", old, num_tokens=1, job="old")
    while not room.ended:
        room.step()
    room.add("young", list(range(100, 120)), num_tokens=50, rank=9, job="young")
    room.step()
    room.add("old-again", old + [9] * 8, num_tokens=40, job="old")
    room.add("beside", [3], num_tokens=30, rank=1)
    began_s = time.monotonic()
    while len(room.ended) < 4:
        room.step()
    assert room.core.utilities.statistics().num_running == 0
    assert time.monotonic() - began_s < STALL_S
    room.core.utilities.check_invariants()
    room.core.close()
