"""An engine core whose executor needs time for loads: no request hangs, and the core does not busy-wait."""

from __future__ import annotations

import time

import pytest

from engine.clock import MonotonicClock
from engine.core.policy import fcfs
from engine.core_process.engine_core import LOAD_POLL_S, EngineCore
from engine.executor import Executor
from engine.frontend.llm import engine_config
from engine.records.messages import AbortRequest, EngineCoreOutput, EngineCoreRequest, FinishReason
from engine.records.sampling_params import SamplingParams
from engine.testing import FakeExecutorFactory

PROMPT = [7] * 320
"""The prompt fills 20 blocks."""


def core_after_eviction(executor: FakeExecutorFactory, *, async_scheduling: bool = False) -> EngineCore:
    """A core where PROMPT has run and was evicted from the device's pool, but not from the host."""
    made: list[Executor] = []

    def make(config: object) -> Executor:
        made.append(executor(engine_config("fake", **options)))
        return made[0]

    options = {"num_gpu_blocks_override": 33, "num_host_blocks_override": 100, "max_model_len": 512}
    options["async_scheduling"] = async_scheduling
    core = EngineCore(engine_config("fake", **options), make, fcfs, MonotonicClock())
    for number, prompt in enumerate((PROMPT, [9] * 500)):
        run(core, f"before-{number}", prompt)
    assert core.utilities.statistics().num_used_host_blocks == 20 + 31
    return core


def add(core: EngineCore, request_id: str, prompt: list[int]) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    assert not core.add_request(EngineCoreRequest(request_id, prompt, params, core.now()))


def run(core: EngineCore, request_id: str, prompt: list[int] = PROMPT) -> EngineCoreOutput:
    """Adds a request and steps until it has ended; returns its last output."""
    add(core, request_id, prompt)
    while core.wait_for_work():
        message = core.step()
        for output in message.outputs if message is not None else []:
            if output.finished:
                return output
    raise AssertionError("the core stopped")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_while_only_a_load_is_pending_the_core_polls(async_scheduling: bool) -> None:
    """A load of 60 steps takes 60 polls with a pause before each: not 60 immediate steps, nor 60 stalls."""
    core = core_after_eviction(FakeExecutorFactory(load_steps=60), async_scheduling=async_scheduling)
    started_s = time.monotonic()
    output = run(core, "again")
    assert output.num_cached_tokens == 304
    assert time.monotonic() - started_s > 58 * LOAD_POLL_S
    core.utilities.check_invariants()
    core.close()


def test_a_load_that_fails_costs_only_the_time_to_compute() -> None:
    """The request ends like any other; nothing counts as cached."""
    core = core_after_eviction(FakeExecutorFactory(load_steps=3, fail_load=1))
    output = run(core, "again")
    assert (output.finish_reason, output.num_cached_tokens) == (FinishReason.LENGTH, 0)
    core.close()


def test_the_blocks_of_an_aborted_load_come_back_without_another_request() -> None:
    """The core polls the load although no request is left, then is idle."""
    core = core_after_eviction(FakeExecutorFactory(load_steps=10))
    add(core, "gone", PROMPT)
    core.step()
    assert core.utilities.statistics().num_loading == 1
    assert len(core.abort_requests(AbortRequest(["gone"]))) == 1
    assert not core.utilities.reset_prefix_cache()
    while core.scheduler.num_pending_loads:
        assert core.wait_for_work()
        core.step()
    assert core.utilities.reset_prefix_cache()
    assert core.utilities.statistics().num_used_host_blocks == 0
    core.close()


def test_others_are_served_during_a_load() -> None:
    """A request that arrives during a long load runs at once, and the load ends meanwhile."""
    core = core_after_eviction(FakeExecutorFactory(load_steps=4))
    add(core, "again", PROMPT)
    core.step()
    assert run(core, "other", [1] * 20).finish_reason is FinishReason.LENGTH
    assert core.utilities.statistics().num_loading == 1
    core.abort_requests(AbortRequest(["again"]))
    core.close()
