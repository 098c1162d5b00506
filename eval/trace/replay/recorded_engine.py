"""Recreates the scheduler and the policy of a trace; they take its inputs and emit the resulting events."""

from __future__ import annotations

from engine.config.engine_config import SchedulerConfig
from engine.core.encoder_cache_manager import EncoderCacheManager
from engine.core.offload.disk_tier import DiskLevel
from engine.core.offload.offloading_connector import OffloadingConnector
from engine.core.outputs import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from engine.core.policy import PolicyContext, PolicyFactory
from engine.core.scheduler import Scheduler
from engine.core.scheduler_report import PauseState
from engine.core.trace.inputs import ENDINGS
from engine.core.traced_scheduler import TracedScheduler
from engine.records.lessons import ModelLearned
from engine.records.messages import JobFinished, Signal, ToolCall, ToolGapStarted, ToolSignal, ToolState
from engine.records.row_failures import NOT_NUMBERS
from eval.trace.recorded_groups import recorded_groups
from eval.trace.replay.block_names import BlockNames
from eval.trace.replay.errors import NotReplayableError
from eval.trace.replay.recorded_policy import recorded_policy
from eval.trace.replay.recorded_request import (
    GOING_ON,
    REFUSED,
    STOPPING,
    RecordedGrammar,
    RecordedRequest,
)
from tracing.events import (
    DraftsProposed,
    EncoderCacheReset,
    EngineClosed,
    GrammarReady,
    IdleEvent,
    InputEvent,
    PauseEvent,
    PrefixCacheReset,
    RequestArrived,
    RequestsEnded,
    SignalEvent,
    StepDecision,
    StepOutput,
    TraceEvent,
    TraceHeader,
)
from tracing.tracer import Tracer

STATUS_OF = {how: status for status, how in ENDINGS.items()}
LAST_TOKEN = {"stop": STOPPING, "length": GOING_ON, "error": REFUSED}


class RecordedEngine:
    """The engine of a trace, made from its header; a sink for its own events."""

    def __init__(self, header: TraceHeader, policy: PolicyFactory | None = None) -> None:
        """``policy`` replaces the one that the header describes. NotReplayableError if that cannot be
        recreated."""
        self._block_size = header.block_size
        self._names = BlockNames()
        self._plans: dict[int, SchedulerOutput] = {}
        """Plans by step; kept until the output of the following step has arrived."""
        self._events: list[TraceEvent] = []
        tracer = Tracer(self)
        groups = recorded_groups(header)
        context = PolicyContext(
            header.block_size,
            header.num_blocks,
            tracer,
            num_host_blocks=header.num_host_blocks,
            kv_cache_groups=groups,
            num_states=header.num_states,
        )
        scheduler = Scheduler(
            _scheduler_config(header),
            block_size=header.block_size,
            num_blocks=header.num_blocks + 1,
            max_model_len=header.max_model_len,
            policy=(policy or recorded_policy(header))(context),
            enable_prefix_caching=header.enable_prefix_caching,
            kv_connector=_second_tier(header),
            loads_remote=header.loads_remote,
            kv_cache_groups=groups,
            num_states=header.num_states + 1 if header.num_states else 0,
            num_stages=header.num_stages,
        )
        scheduler.kv.num_lookahead_tokens = header.num_lookahead_tokens
        if header.encoder_cache_size:
            scheduler.add_parts(_encoder(header))
        self.scheduler = TracedScheduler(scheduler, tracer)
        self.header = self.scheduler.begin_trace(header.wall_time_s, header.monotonic_s, from_start=True)

    def emit(self, event: TraceEvent) -> None:
        self._events.append(event)

    def take(self, event: InputEvent) -> list[TraceEvent]:
        """Feeds in a recorded input; returns the events that it causes, its own record last.

        NotReplayableError if the scheduler does not accept it: the trace then records something impossible.
        """
        self._events = []
        try:
            self._apply(event)
        except (AssertionError, KeyError, ValueError, IndexError) as error:
            raise NotReplayableError(f"the scheduler does not take this input: {error!r}") from error
        return self._events

    def _apply(self, event: InputEvent) -> None:
        scheduler = self.scheduler
        match event:
            case StepDecision():
                self._plans[event.step] = scheduler.schedule(event.now)
            case StepOutput():
                self._step_output(event)
            case RequestArrived():
                segment, chain = self._names.open(event)
                request = RecordedRequest(event, segment, chain, self._block_size)
                scheduler.add_request(request, event.now)
            case GrammarReady():
                awaited = scheduler.compiling[event.req_id]
                scheduler.grammar_compiled(awaited, RecordedGrammar(), event.now)
            case RequestsEnded():
                scheduler.finish_requests(event.req_ids, STATUS_OF[event.how], event.now)
            case SignalEvent():
                scheduler.signal(_signal(event), event.now)
            case PauseEvent():
                scheduler.set_pause_state(PauseState(event.state), event.now)
            case EncoderCacheReset() | PrefixCacheReset():
                self._reset(event)
            case DraftsProposed():
                drafts = {req_id: [GOING_ON] * count for req_id, count in event.num_tokens.items()}
                scheduler.update_draft_token_ids(drafts, event.now)
            case IdleEvent():
                scheduler.expire(event.now)
            case EngineClosed():
                scheduler.close(event.now)

    def _reset(self, event: EncoderCacheReset | PrefixCacheReset) -> None:
        if isinstance(event, EncoderCacheReset):
            self.scheduler.reset_encoder_cache(event.now)
        else:
            self.scheduler.reset_prefix_cache(event.now)

    def _plan_of(self, event: StepOutput) -> SchedulerOutput:
        self._plans = {step: plan for step, plan in self._plans.items() if step >= event.step}
        return self._plans.get(event.step) or SchedulerOutput([], CachedRequestData(), {}, 0, set(), set())

    def _step_output(self, event: StepOutput) -> None:
        plan = self._plan_of(event)
        for req_id, names in event.blocks.items():
            request = self.scheduler.requests[req_id]
            assert isinstance(request, RecordedRequest)
            request.expect(self._names.extend(request.segment, names))
        sampled = list(plan.num_scheduled_tokens) if event.sampled is None else event.sampled
        tokens = [self._tokens_of(req_id, event) for req_id in sampled]
        result = ModelRunnerOutput(
            sampled,
            tokens,
            finished_loads=event.finished_loads,
            failed_loads=event.failed_loads,
            finished_disk_writes=event.finished_disk_writes,
            failed_disk_writes=event.failed_disk_writes,
            released_kv_leases=event.released_leases,
            renewed_kv_leases=event.renewed_leases,
            failed={
                req_id: NOT_NUMBERS if req_id in event.forgotten else ""
                for req_id in event.ended
                if event.num_tokens.get(req_id) == 0
            },
        )
        self.scheduler.update_from_output(plan, result, event.now)

    @staticmethod
    def _tokens_of(req_id: str, event: StepOutput) -> list[int]:
        tokens = [GOING_ON] * (event.num_tokens.get(req_id, 1) or 1)  # meaningless for a failed request
        ending = event.ended.get(req_id)
        if ending is not None:
            tokens[-1] = LAST_TOKEN[ending]
        return tokens


def _scheduler_config(header: TraceHeader) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=header.max_num_seqs,
        max_loras=header.max_loras or None,
        max_num_batched_tokens=header.max_num_batched_tokens,
        enable_chunked_prefill=header.enable_chunked_prefill,
        long_prefill_token_threshold=header.long_prefill_token_threshold,
        scheduler_reserve_full_isl=header.scheduler_reserve_full_isl,
        async_scheduling=header.async_scheduling,
    )


def _encoder(header: TraceHeader) -> EncoderCacheManager:
    return EncoderCacheManager(
        header.encoder_cache_size,
        header.max_encoder_input_tokens,
        keeps_whole=header.disable_chunked_mm_input,
    )


def _second_tier(header: TraceHeader) -> OffloadingConnector | None:
    if not header.num_host_blocks:
        return None
    disk = None
    if header.num_disk_blocks:
        disk = DiskLevel(
            num_blocks=header.num_disk_blocks,
            max_writes=header.max_disk_writes,
            fixed_tokens=header.disk_fixed_tokens,
            read_share=header.disk_read_share,
        )
    return OffloadingConnector(header.num_host_blocks, header.block_size, header.min_load_tokens, disk)


def _signal(event: SignalEvent) -> Signal:
    if event.kind == "tool_gap_started":
        assert event.req_id is not None
        calls = [ToolCall(call.name, call.arguments) for call in event.calls]
        return ToolGapStarted(event.req_id, calls)
    if event.kind == "model_learned":
        return ModelLearned(event.model or "")
    assert event.job_id is not None
    if event.kind == "job_finished":
        return JobFinished(event.job_id)
    return ToolSignal(
        event.job_id,
        ToolState(event.state or ""),
        request_id=event.req_id,
        call_id=event.call_id,
        tool=event.tool,
        expected_s=event.expected_s,
        remaining_s=event.remaining_s,
        fraction=event.fraction,
    )
