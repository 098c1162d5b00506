"""A simulated engine under fcfs makes the recorded scheduler's decisions, step by step."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

from engine.config.engine_config import SchedulerConfig
from engine.core.kv_cache.block_hash import BlockHasher
from engine.core.outputs import SchedulerOutput
from engine.core.step import Step
from engine.records.messages import EngineCoreOutput
from eval.sim.event_heap import EventHeap
from eval.sim.replicas import exact
from eval.sim.replicas.exact import ExactReplica
from eval.sim.replicas.replica import ReplicaConfig
from eval.sim.sim_request import SimRequest
from tests.conformance.golden import (
    POLICIES,
    GoldenCase,
    GoldenRequest,
    GoldenStep,
    V1Scheduler,
    read_cases,
    sample,
)
from tests.eval.sim.plain_cost import PlainCost
from tracing.events import PrefixCacheEvent, StepDecision, TraceEvent
from tracing.tracer import Tracer
from tracing.writer import TraceWriter

GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "golden" / "scheduler.jsonl.gz"
NUM_CASES = 60


class _PausingScheduler(V1Scheduler):
    """An empty step takes as long as any other, as in the recording."""

    def plan(self, step: Step) -> SchedulerOutput:
        plan = super().plan(step)
        self.replan_at_once = False
        return plan


class _PunctualReplica(ExactReplica):
    """Adds ready requests just before each step, as the recording did."""

    before_step: Callable[[], None]

    def _step(self) -> None:
        self._stepping = True
        self.before_step()
        self._stepping = False
        super()._step()

    def wake(self) -> None:
        self._wake()


class _GoldenRun:
    """One recorded case, run on a replica."""

    def __init__(self, case: GoldenCase) -> None:
        config = case.config
        self._max_model_len = config.max_model_len
        self._hasher = BlockHasher(config.block_size)
        self._pending = list(case.requests)
        self._tokens: dict[str, list[int]] = {}
        self._finished: set[str] = set()
        self._events = EventHeap()
        self._file = io.BytesIO()
        self._file.close = lambda: None  # type: ignore[method-assign]  # read when the trace is closed
        self._writer = TraceWriter(self._file)
        self._replica = _PunctualReplica(
            ReplicaConfig(
                cost=PlainCost(step_overhead_s=1.0),  # A step's number is its time.
                scheduler=SchedulerConfig(
                    max_num_seqs=config.max_num_seqs,
                    max_num_batched_tokens=config.max_num_batched_tokens,
                    scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
                ),
                block_size=config.block_size,
                num_blocks=config.num_blocks - 1,
                max_model_len=config.max_model_len,
                enable_prefix_caching=config.enable_prefix_caching,
                stalled_retry_s=1.0,
                tracer=Tracer(self._writer),
            ),
            POLICIES[config.policy](),
            self._events,
            self._on_outputs,
        )
        self._replica.before_step = self._add_ready
        for request in case.requests:
            self._events.at(float(request.step), self._replica.wake)

    def run(self) -> list[GoldenStep]:
        """Returns all steps in which something was scheduled or preempted."""
        self._events.run()
        self._writer.close()
        decoder = msgspec.json.Decoder(TraceEvent)
        events = [decoder.decode(line) for line in self._file.getvalue().splitlines()]
        hits = {(e.step, e.req_id): e.hit_tokens for e in events if isinstance(e, PrefixCacheEvent)}
        return [
            GoldenStep(
                step=round(e.now),
                new=e.new,
                resumed=e.resumed,
                running=e.running,
                preempted=sorted(e.preempted),
                tokens=e.tokens,
                computed={i: hits[e.step, i] for i in (*e.new, *e.resumed)},
                free_blocks=e.free_blocks,
                finished=[],
            )
            for e in events
            if isinstance(e, StepDecision) and (e.tokens or e.preempted)
        ]

    def _on_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        self._finished.update(output.request_id for output in outputs)

    def _add_ready(self) -> None:
        now = self._events.now
        ready = [
            r for r in self._pending if r.step <= now and (r.parent is None or r.parent in self._finished)
        ]
        for index, recorded in enumerate(ready):
            self._pending.remove(recorded)
            self._add(recorded, now + index * 1e-4)

    def _add(self, recorded: GoldenRequest, arrival_time: float) -> None:
        prompt = recorded.prompt
        if recorded.parent:
            longest = self._max_model_len - recorded.max_tokens - 2
            prompt = (self._tokens[recorded.parent] + prompt)[:longest]
        tokens = list(prompt)
        for _ in range(recorded.max_tokens):
            tokens.append(sample(recorded.id, len(tokens)))
        self._tokens[recorded.id] = tokens[: self._max_model_len]
        chain: list[bytes] = []
        self._hasher.extend(chain, tokens)
        request = SimRequest(
            recorded.id,
            num_prompt_tokens=len(prompt),
            num_output_tokens=recorded.max_tokens,
            chain=chain,
            block_size=self._hasher.block_size,
            arrival_time=arrival_time,
            job=None,
        )
        request.priority = recorded.priority
        self._replica.add_request(request)


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.skipif(not GOLDEN.exists(), reason="the recorded decisions are not beside the repository")
def test_the_simulator_decides_as_the_recorded_scheduler_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """New, resumed, running and preempted requests, their tokens, hits and free blocks are equal."""
    monkeypatch.setattr(exact, "Scheduler", _PausingScheduler)
    cases = list(read_cases(GOLDEN))
    assert len(cases) == NUM_CASES
    for number, case in enumerate(cases, start=1):
        expected = [msgspec.structs.replace(s, finished=[]) for s in case.steps if s.tokens or s.preempted]
        assert _GoldenRun(case).run() == expected, f"case {number}"
