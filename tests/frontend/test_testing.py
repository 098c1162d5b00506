"""The stand-in for the model keeps the real executor's contract."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.clock import ManualClock
from engine.config.engine_config import EngineConfig
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.policy import fcfs
from engine.core_process.engine_core import EngineCore
from engine.errors import EngineError
from engine.executor import Executor, FinishedOutput, PendingOutput
from engine.frontend.llm import engine_config
from engine.records.messages import EngineCoreRequest
from engine.records.sampling_params import SamplingParams
from engine.testing import FakeExecutorFactory
from engine.worker.executor import UniProcExecutor


class Pair:
    """Runs every plan on the real executor and on the stand-in, and compares their results."""

    def __init__(self, config: EngineConfig) -> None:
        self._real: Executor = UniProcExecutor(config)
        self._fake: Executor = FakeExecutorFactory()(config)
        self.info = self._real.info
        self.num_steps = 0
        self.num_resumed = 0
        self.num_loads = 0
        groups = self.info.kv_cache_groups
        assert dataclasses.replace(self._fake.info, kv_cache_groups=groups) == self.info
        assert [group.is_full for group in groups] == [g.is_full for g in self._fake.info.kv_cache_groups]

    @property
    def max_concurrent_batches(self) -> int:
        return 1

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        real, fake = self._real.submit(plan).result(), self._fake.submit(plan).result()
        assert _by_request(real) == _by_request(fake)
        assert list(real.finished_loads) == list(fake.finished_loads) == [x.load_id for x in plan.kv_loads]
        assert list(real.failed_loads) == list(fake.failed_loads) == []
        assert real.logprobs.keys() == fake.logprobs.keys()
        for req_id, positions in real.logprobs.items():
            for ours, theirs in zip(positions, fake.logprobs[req_id], strict=True):
                assert len(ours.token_ids) == len(theirs.token_ids)
                assert ours.token_ids[0] == theirs.token_ids[0]
        self.num_steps += 1
        self.num_resumed += len(plan.scheduled_cached_reqs.resumed_req_ids)
        self.num_loads += len(plan.kv_loads)
        return FinishedOutput(real)

    def on_failure(self, told: Callable[[EngineError], None]) -> None:
        self._real.on_failure(told)

    def on_wave(self, told: Callable[[int], None]) -> None:
        self._real.on_wave(told)

    def call_worker(self, method: str, *args: object) -> None: ...

    def shutdown(self) -> None:
        self._real.shutdown()
        self._fake.shutdown()


def _by_request(result: ModelRunnerOutput) -> dict[str, list[int]]:
    """Results by request id: an executor may return them in any order."""
    return dict(zip(result.req_ids, result.sampled_token_ids, strict=True))


@pytest.mark.parametrize("num_blocks", [200, 18], ids=["roomy", "with preemption"])
def test_it_answers_every_plan_as_the_real_one_does(model_folder: Path, num_blocks: int) -> None:
    """The stand-in returns the same ids and samples at the same steps: chunked, resumed, hit or not."""
    config = engine_config(
        str(model_folder), num_gpu_blocks_override=num_blocks, max_num_batched_tokens=24, max_model_len=256
    )
    pairs: list[Pair] = []

    def make_pair(config: EngineConfig) -> Pair:
        pairs.append(Pair(config))
        return pairs[0]

    core = EngineCore(config, make_pair, fcfs, ManualClock())
    for number in range(6):
        forced = [(number * 50 + position) % 500 for position in range(30)]
        params = SamplingParams(
            max_tokens=30, replay_token_ids=forced, ignore_eos=True, logprobs=2 if number % 2 else None
        )
        core.add_request(EngineCoreRequest(f"r{number}-0", [number] * (5 + 11 * number), params, 0.0))
    while core.scheduler.has_unfinished_requests():
        core.step()
    core.scheduler.check_invariants()
    assert pairs[0].num_steps > 30
    assert (pairs[0].num_resumed > 0) == (num_blocks == 18)
    core.close()


def test_it_reports_loads_as_the_real_one_does(model_folder: Path) -> None:
    """A load ends in the step that starts it, whether or not anything else runs in that step."""
    config = engine_config(
        str(model_folder), num_gpu_blocks_override=18, num_host_blocks_override=100, max_model_len=256
    )
    pairs: list[Pair] = []

    def make_pair(config: EngineConfig) -> Pair:
        pairs.append(Pair(config))
        return pairs[0]

    core = EngineCore(config, make_pair, fcfs, ManualClock())
    for number in range(4):
        forced = list(range(9))
        params = SamplingParams(max_tokens=9, replay_token_ids=forced, ignore_eos=True)
        core.add_request(EngineCoreRequest(f"r{number}-0", [number % 2] * 200, params, 0.0))
        while core.scheduler.has_unfinished_requests():
            core.step()
    core.scheduler.check_invariants()
    assert pairs[0].num_loads == 2
    core.close()


def test_its_factory_crosses_into_another_process() -> None:
    """All settings of the factory are pickled with it."""
    factory = FakeExecutorFactory(kill_at_step=3, gate=Path("gate"))
    assert pickle.loads(pickle.dumps(factory)) == factory
