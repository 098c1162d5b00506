"""Extracts from a scheduler trace what each step computed and how long it took. Knows no cost model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from eval.sim.cost_model import StepWork
from eval.trace.draft_outcomes import DraftOutcomes
from tracing.events import (
    PrefixCacheEvent,
    StepDecision,
    StepOutput,
    StepSnapshot,
    TraceEvent,
    TraceHeader,
)


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step of a real engine."""

    begin_s: float
    """Start on the engine's clock, which all processes of a machine share."""
    seconds: float | None
    """Time until the next step began, or could; None where the engine may have been idle in
    between."""
    work: StepWork
    request_ids: list[str]


@dataclass(slots=True)
class _Engine:
    """The number of computed tokens of each request, as traced."""

    num_computed: dict[str, int] = field(default_factory=dict)
    drafts: DraftOutcomes = field(default_factory=DraftOutcomes)

    def work_of(self, decision: StepDecision) -> StepWork:
        """Returns what the step computes; as in the simulator, one new token is a decode, more are a prefill,
        and a draft is a decode without its context."""
        self.drafts.decided(decision)
        for request_id in decision.preempted:
            self.num_computed.pop(request_id, None)
        work = StepWork()
        for request_id, num_tokens in decision.tokens.items():
            num_drafts = decision.drafts.get(request_id, 0)
            num_new = num_tokens - num_drafts
            work.num_decodes += num_drafts
            known = self.num_computed.get(request_id, 0)
            self.num_computed[request_id] = known + num_new
            if num_new == 1:
                work.num_decodes += 1
                work.decode_context_tokens += known + 1
            else:
                work.prefills.append((num_new, known))
        return work

    def take(self, output: StepOutput) -> None:
        """Counts accepted drafts as computed."""
        for request_id, _, num_accepted in self.drafts.came(output):
            if request_id in self.num_computed:
                self.num_computed[request_id] += num_accepted


def step_samples(events: Iterable[TraceEvent]) -> Iterator[StepSample]:
    """Yields the steps of a trace that computed something, in order."""
    events = iter(events)
    first = next(events, None)
    if first is None:
        return
    overlap = isinstance(first, TraceHeader) and first.async_scheduling
    yield from (_overlapping if overlap else _one_by_one)(chain([first], events))


def _overlapping(events: Iterable[TraceEvent]) -> Iterator[StepSample]:
    """Yields steps of async scheduling: a step begins when it is decided or, if later, at the result of the
    one before; it ends at its own result."""
    engine = _Engine()
    under_way: dict[int, tuple[StepDecision, StepWork]] = {}
    free_at_s = 0.0
    for event in events:
        if isinstance(event, PrefixCacheEvent):
            engine.num_computed[event.req_id] = event.hit_tokens
        elif isinstance(event, StepDecision):
            under_way[event.step] = event, engine.work_of(event)
        elif isinstance(event, StepOutput) and event.step in under_way:
            engine.take(event)
            decision, work = under_way.pop(event.step)
            begin_s = max(decision.now, free_at_s)
            free_at_s = event.now
            if decision.tokens:
                yield StepSample(begin_s, event.now - begin_s, work, list(decision.tokens))


def _one_by_one(events: Iterable[TraceEvent]) -> Iterator[StepSample]:
    engine = _Engine()
    last: tuple[StepDecision, StepWork] | None = None
    for event in events:
        if isinstance(event, StepSnapshot):
            if last is not None:
                yield _sample(*last, event)
            last = None
        elif isinstance(event, PrefixCacheEvent):
            engine.num_computed[event.req_id] = event.hit_tokens
        elif isinstance(event, StepDecision) and event.tokens:
            last = event, engine.work_of(event)
        elif isinstance(event, StepOutput):
            engine.take(event)
    if last is not None:
        yield _sample(*last, None)


def _sample(decision: StepDecision, work: StepWork, following: StepSnapshot | None) -> StepSample:
    # A request that continues in the next step shows that the engine did not sleep between the two.
    busy = following is not None and not decision.tokens.keys().isdisjoint(following.running)
    seconds = following.now - decision.now if busy and following is not None else None
    return StepSample(decision.now, seconds, work, list(decision.tokens))
