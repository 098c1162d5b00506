"""Whatever happens to a scheduler, its trace replays: it contains all inputs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings

from engine.core.policy import PolicyFactory
from eval.trace.replay.recorded_engine import RecordedEngine
from eval.trace.replay.replay import ReplayResult, compare
from tests.core.test_scheduler_machine import SchedulerMachine, make_policy
from tracing.events import StepDecision, TraceEvent, TraceHeader

pytestmark = pytest.mark.slow


class TracedMachine(SchedulerMachine):
    """Any policy, also those for simulation only; the trace is converted to JSON and back, as in a file."""

    def on_start(self, policy: str, bits: list[bool]) -> None:
        self.factory: PolicyFactory = lambda context: make_policy(policy, bits, context)
        self.header: TraceHeader = self.room.begin_trace(from_start=True)
        self.lines: list[bytes] = []
        self.tracer.add(self)

    def emit(self, event: TraceEvent) -> None:
        self.lines.append(msgspec.json.encode(event))

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "room"):
            return
        decode = msgspec.json.Decoder(TraceEvent).decode
        events = [decode(line) for line in self.lines]
        result = ReplayResult()
        compare(RecordedEngine(self.header, self.factory), events, result)
        assert result.whole, str(result)
        assert not result.notes
        assert result.num_steps == sum(isinstance(event, StepDecision) for event in events)


TestReplay = TracedMachine.TestCase
TestReplay.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
