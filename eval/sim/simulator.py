"""Plays jobs against simulated engines: an agent sends a turn, gets the answer, runs its tool, and
repeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.records.messages import (
    EngineCoreOutput,
    FinishReason,
    JobFinished,
    JobRef,
    Signal,
    ToolCall,
    ToolGapStarted,
)
from eval.baselines.knowledge import NamedPolicy
from eval.load.records import (
    EngineCounters,
    JobRecord,
    Occupancy,
    TurnRecord,
    recomputed_tokens,
    told,
)
from eval.sim.block_chains import BlockNames, JobChain
from eval.sim.event_heap import EventHeap
from eval.sim.foresight import Foresight
from eval.sim.lessons import teach
from eval.sim.pool_checks import check_fit
from eval.sim.replicas.counters import engine_counters
from eval.sim.replicas.make import check_replica_model, make_replicas
from eval.sim.replicas.occupancy import OccupancySampler
from eval.sim.replicas.prefillers import Prefillers
from eval.sim.replicas.replica import SimReplica
from eval.sim.replicas.router import EngineRouter, make_router
from eval.sim.replicas.upgrades import Upgrades
from eval.sim.sim_config import SimConfig
from eval.sim.sim_request import SimRequest
from eval.workloads.families import roots
from eval.workloads.job import GapKind, Job, Turn
from tracing.tracer import Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRun:
    """The results of a simulation, in the form of a measured run."""

    jobs: list[JobRecord]
    turns: list[TurnRecord]
    counters: EngineCounters
    occupancy: Occupancy
    num_steps: int
    simulated_s: float


@dataclass(slots=True, eq=False)
class _Agent:
    """The state of one running job."""

    job: Job
    chain: JobChain
    arrival_s: float
    parent: _Agent | None
    next_turn: int = 0
    last: TurnRecord | None = None
    num_children: int = 0
    """Sub-agents that it waits for."""
    tools_done: bool = False
    """Whether the gap's own time is over."""


@dataclass(slots=True, eq=False)
class _OpenTurn:
    """A turn between its sending and its answer."""

    agent: _Agent
    request: SimRequest
    record: TurnRecord
    sent_s: float


class Simulator:
    """One run of all jobs under one policy."""

    def __init__(
        self, config: SimConfig, policy: NamedPolicy, jobs: Sequence[Job], tracer: Tracer | None = None
    ) -> None:
        """``jobs`` include the sub-agents that they start. ``tracer`` is for a single replica. WorkloadError
        if a job can never fit."""
        check_fit(config, jobs)
        check_replica_model(config, policy)
        self._config = config
        self._jobs = {job.job_id: job for job in jobs}
        self._events = EventHeap()
        self._names = BlockNames(config.block_size, share_prefixes=config.share_prefixes)
        self._router = make_router(config.router, config.num_replicas, config.block_size)
        host_sizes = config.sizes if config.host_kv_tokens else None
        self._foresight = Foresight(self._jobs, config.cost, host_sizes)
        self._make = partial(
            make_replicas,
            model=config.replica_model,
            config=config.replica(max(job.max_context_tokens for job in jobs) + 1, tracer),
            make_policy=lambda: policy.make(config.policy_context(tracer), self._foresight),
            events=self._events,
        )
        self._replicas = self._make(config.num_replicas, on_outputs=self._on_outputs)
        self._prefillers = self._make_prefillers(config) if config.num_prefill_replicas else None
        self._sampler = OccupancySampler(self._replicas)
        self._upgrades = self._make_upgrades(config) if config.upgrade_s is not None else None
        self._open: dict[str, _OpenTurn] = {}
        self._turn_records: list[TurnRecord] = []
        self._job_records: list[JobRecord] = []
        self._num_places = len(jobs)
        """Root jobs that may start now."""
        self._without_place: deque[Job] = deque()

    def _make_prefillers(self, config: SimConfig) -> Prefillers:
        router = make_router(config.router, config.num_prefill_replicas, config.block_size)
        hop_s = config.cost.reply_overhead_s + config.cost.arrival_overhead_s
        prefillers = Prefillers(router, self._events, hop_s)
        prefillers.replicas = self._make(config.num_prefill_replicas, on_outputs=prefillers.on_outputs)
        return prefillers

    def _make_upgrades(self, config: SimConfig) -> Upgrades:
        assert config.upgrade_s is not None
        assert isinstance(self._router, EngineRouter)
        return Upgrades(
            self._replicas,
            self._events,
            config.upgrade_s,
            config.block_size,
            self._router.lost,
            hands_over=config.upgrade_hands_over,
        )

    def run(self, arrivals_s: Sequence[float], concurrency: int | None = None) -> SimRun:
        """Plays the root jobs, in order, from their arrivals to their ends.

        ``concurrency``: the most at once; a job that has arrived waits until an earlier one has ended, and
        its time counts from then.
        """
        if concurrency is not None:
            self._num_places = concurrency
        for job, arrival_s in zip(roots(self._jobs.values()), arrivals_s, strict=True):
            self._events.at(arrival_s, lambda job=job: self._arrive(job))  # type: ignore[misc]
        self._events.run()
        assert len(self._job_records) == len(self._jobs), "a job did not end"
        return self._finished_run()

    # ---- the agent's side ----

    def _arrive(self, job: Job) -> None:
        if not self._num_places:
            self._without_place.append(job)
            return
        self._num_places -= 1
        self._start(job, None)

    def _start(self, job: Job, parent: _Agent | None) -> None:
        self._send(_Agent(job, JobChain(self._names, job), self._events.now, parent))

    def _send(self, agent: _Agent) -> None:
        """Sends the agent's next turn."""
        index = agent.next_turn
        agent.next_turn += 1
        turn = agent.job.turns[index]
        now = self._events.now
        queued_s = now + self._config.cost.arrival_overhead_s
        is_last = turn.told_last or (self._config.tell_last_step and index + 1 == len(agent.job.turns))
        request = SimRequest(
            request_id(agent.job, index),
            num_prompt_tokens=turn.input_tokens,
            num_output_tokens=turn.sampled_tokens,
            chain=agent.chain.turn(index),
            block_size=self._config.block_size,
            arrival_time=queued_s,
            job=self._job_ref(agent.job, is_last=is_last),
            priority=agent.job.priority,
        )
        replica = self._router.choose(request, agent.job.job_id, self._replicas, now)
        record = TurnRecord(
            job_id=agent.job.job_id,
            turn=index + 1,
            start_s=now,
            prompt_tokens=turn.input_tokens,
            tool=turn.tool,
            command=turn.command,
            as_recorded=True,
            replica=replica,
        )
        self._open[request.request_id] = _OpenTurn(agent, request, record, now)
        home = self._replicas[replica]
        if self._upgrades is not None:
            self._upgrades.before(request)
        if self._prefillers is not None:
            above = self._config.prefill_above
            self._prefillers.send(request, agent.job.job_id, queued_s, home, above=above)
        else:
            self._events.at(queued_s, lambda: home.add_request(request))

    def _job_ref(self, job: Job, *, is_last: bool) -> JobRef | None:
        """What the client says of a turn's job; None if it names none."""
        parent_id = job.parent_job if self._config.tell_parents else None
        return JobRef(job.job_id, is_last, job.tenant, parent_id=parent_id) if job.is_known else None

    def _on_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Handles turns that ended in a step: their clients get the responses a little later."""
        for output in outputs:
            assert output.finish_reason is FinishReason.LENGTH
            answered = self._open.pop(output.request_id)
            self._note_engine_times(answered)
            answered.record.receipt = output.receipt
            self._events.at(
                self._events.now + self._config.cost.reply_overhead_s,
                lambda answered=answered: self._on_reply(answered),  # type: ignore[misc]
            )
            if self._upgrades is not None:
                self._upgrades.ended(answered.record.replica)
        self._sampler.look(self._events.now)

    def _note_engine_times(self, answered: _OpenTurn) -> None:
        request = answered.request
        record = answered.record
        overhead_s = self._config.cost.reply_overhead_s
        assert request.first_token_time is not None
        assert request.first_scheduled_time is not None
        record.ttft_s = request.first_token_time + overhead_s - answered.sent_s
        record.queued_s = request.first_scheduled_time - request.arrival_time
        record.latency_s = self._events.now + overhead_s - answered.sent_s
        record.cached_tokens = request.num_cached_tokens or 0
        record.output_tokens = request.num_output_tokens
        record.finish_reason = "length"

    def _on_reply(self, answered: _OpenTurn) -> None:
        """Handles an answer's arrival at the client: the tools run, or the job is done."""
        agent = answered.agent
        record = answered.record
        turn = agent.job.turns[record.turn - 1]
        record.recomputed_tokens = _recomputed(agent.last, record, turn)
        agent.last = record
        self._turn_records.append(record)
        self._signal(answered, turn)
        if agent.next_turn == len(agent.job.turns):
            if self._config.lessons:
                teach(self._replicas[record.replica])
            self._tell_finished(agent.job, record.replica)
            self._finish(agent)
            return
        record.gap_s = turn.gap_s or 0.0
        agent.tools_done = False
        children = [self._jobs[job_id] for job_id in turn.spawns if job_id in self._jobs]
        agent.num_children = len(children)
        for child in children:
            self._start(child, agent)
        self._events.at(self._events.now + record.gap_s, lambda: self._on_tools_done(agent))

    def _signal(self, answered: _OpenTurn, turn: Turn) -> None:
        """Sends the signal of the API server, which has parsed the response, about the tools that run."""
        replica = self._replicas[answered.record.replica]
        if not replica.wants_signals or not turn.tells_calls or not answered.agent.job.is_known:
            return
        calls = [ToolCall(call.tool, call.command or "") for call in turn.calls]
        if not calls and turn.gap_kind is GapKind.TOOL:
            calls = [ToolCall("unnamed")]
        receipt = replica.signal(ToolGapStarted(answered.request.request_id, calls))
        answered.record.receipt = receipt or answered.record.receipt

    def _tell_finished(self, job: Job, number: int) -> None:
        replica = self._replicas[number]
        if job.finished_s is not None and replica.wants_signals:
            self._events.at(
                self._events.now + job.finished_s,
                lambda: _tell(replica, JobFinished(job.job_id)),
            )

    def _on_tools_done(self, agent: _Agent) -> None:
        agent.tools_done = True
        self._return(agent)

    def _return(self, agent: _Agent) -> None:
        """Sends the next turn once the tools and all sub-agents are done."""
        if agent.tools_done and not agent.num_children:
            self._send(agent)

    def _finish(self, agent: _Agent) -> None:
        job = agent.job
        self._job_records.append(
            JobRecord(
                job_id=job.job_id,
                source=job.source,
                parent_job=job.parent_job,
                start_s=agent.arrival_s,
                end_s=self._events.now,
                num_turns=len(job.turns),
                num_planned_turns=len(job.turns),
                num_recorded_turns=len(job.turns),
            )
        )
        if len(self._job_records) == len(self._jobs):
            # The run is over: later pins are not part of it.
            self._events.stop()
            return
        if agent.parent is not None:
            agent.parent.num_children -= 1
            self._return(agent.parent)
            return
        self._num_places += 1
        if self._without_place:
            self._arrive(self._without_place.popleft())

    # ---- the end ----

    def _finished_run(self) -> SimRun:
        counts = [replica.close() for replica in self._replicas]
        counts += self._prefillers.close() if self._prefillers is not None else []
        return SimRun(
            jobs=sorted(self._job_records, key=lambda job: job.start_s),
            turns=sorted(self._turn_records, key=lambda turn: turn.start_s),
            counters=engine_counters(
                self._config, counts, sum(turn.output_tokens for turn in self._turn_records)
            ),
            occupancy=self._sampler.occupancy,
            num_steps=sum(each.num_steps for each in counts),
            simulated_s=self._events.now,
        )


def _tell(replica: SimReplica, signal: Signal) -> None:
    """Sends a signal and ignores the answer."""
    replica.signal(signal)


def request_id(job: Job, index: int) -> str:
    """Request id of the turn at ``index``, counted from 0."""
    return f"{job.job_id}/{index}"


def _recomputed(last: TurnRecord | None, record: TurnRecord, turn: Turn) -> int:
    """Recomputed tokens as in a replay, counted among those that the recording marks as shared."""
    if last is None:
        return 0
    shared = min(turn.prefix_tokens, recomputed_tokens(last, record.prompt_tokens, 0))
    return max(0, shared - told(record.cached_tokens))
