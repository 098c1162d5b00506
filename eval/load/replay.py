"""Replays planned jobs against a server, on time, and records every turn and every job as it ends."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from eval.errors import ServerError, ServerGoneError
from eval.load.client import Reply, ServerClient, TurnFailedError
from eval.load.conversation import Ask
from eval.load.journal import Journal, last_moment_s
from eval.load.planner import Plan, PlannedJob
from eval.load.progress import Progress, shown
from eval.load.records import JobRecord, Recording, TurnRecord, recomputed_tokens
from eval.load.server_metrics import ServerMetrics
from eval.load.server_type import Identity, ServerType, TurnRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """When jobs start. Sub-agents start when their parent starts them."""

    arrivals_s: Sequence[float]
    """Arrival times of the root jobs, in order."""
    concurrency: int | None = None
    """Maximum number of concurrent root jobs; None: all."""
    warmup_jobs: int = 0
    """Number of first jobs that are not counted."""
    warmup_s: float = 0.0
    """Jobs that start before this second are not counted."""


@dataclass(frozen=True, slots=True)
class Speech:
    """How turns are sent to the server under test."""

    server_type: ServerType
    identity: Identity


@dataclass(slots=True)
class _Warmup:
    """The part of the replay before counting begins."""

    job_ids: set[str] = field(default_factory=set)
    metrics: ServerMetrics | None = None
    """The server's counters when counting began."""


class Replay:
    """One run of all planned jobs, or the rest of an interrupted one."""

    def __init__(
        self,
        client: ServerClient,
        plan: Plan,
        pacing: Pacing,
        speech: Speech,
        *,
        journal: Journal,
        name: str,
        kept: Recording | None = None,
    ) -> None:
        self._client = client
        self._roots = list(zip(plan.roots, pacing.arrivals_s, strict=True))
        self._sub_agents = {job.job_id: job for job in plan.sub_agents}
        self._pacing = pacing
        self._speech = speech
        self._journal = journal
        # A server remembers jobs: the same job in a second run must not look like a continuation.
        self._run_id = os.urandom(3).hex()
        self._slots = asyncio.Semaphore(pacing.concurrency or max(1, len(self._roots)))
        self._kept = kept or Recording()
        self._started = 0.0
        self._warmup = _Warmup({job.job_id for job in self._kept.jobs if job.warmup})
        self.turns: list[TurnRecord] = list(self._kept.turns)
        self.jobs: list[JobRecord] = list(self._kept.jobs)
        self.gone: ServerError | None = None
        """Why the run ended before its jobs did."""
        self.progress = Progress(name, len(plan.jobs), sum(job.num_turns for job in plan.jobs))
        self.progress.jobs_done = len(self.jobs)
        for turn in self.turns:
            self._count(turn)

    @property
    def metrics_before(self) -> ServerMetrics | None:
        """The server's counters when counting began; None if it never did."""
        return self._warmup.metrics

    async def run(self) -> None:
        """Replays all jobs to their ends, or until the server is gone. If cancelled, ended turns are kept."""
        begun_s = last_moment_s(self._kept)
        done = {job.job_id for job in self._kept.jobs}
        self._started = time.perf_counter() - begun_s
        try:
            async with shown(self.progress, self._client), asyncio.TaskGroup() as group:
                for index, (job, arrival_s) in enumerate(self._roots):
                    if job.job_id not in done:
                        group.create_task(self._replay_root(job, index, arrival_s))
        except* ServerError as errors:
            self.gone = _first(errors)

    def counted(self) -> tuple[list[JobRecord], list[TurnRecord]]:
        """Returns jobs and turns without the warm-up; their time begins where counting began."""
        jobs = [job for job in self.jobs if not job.warmup]
        turns = [turn for turn in self.turns if turn.job_id not in self._warmup.job_ids]
        if not self._warmup.job_ids:
            return jobs, turns
        begin_s = min((turn.start_s for turn in turns), default=0.0)
        begin_s = min([begin_s, *(job.start_s for job in jobs)])
        shift = msgspec.structs.replace
        return (
            [shift(job, start_s=job.start_s - begin_s, end_s=job.end_s - begin_s) for job in jobs],
            [shift(turn, start_s=turn.start_s - begin_s) for turn in turns],
        )

    @property
    def num_warmup_jobs(self) -> int:
        return len(self._warmup.job_ids)

    def _now(self) -> float:
        return time.perf_counter() - self._started

    async def _replay_root(self, job: PlannedJob, index: int, arrival_s: float) -> None:
        await asyncio.sleep(arrival_s - self._now())
        async with self._slots:
            warmup = index < self._pacing.warmup_jobs or self._now() < self._pacing.warmup_s
            if not warmup and self._warmup.metrics is None:
                self._warmup.metrics = await self._client.metrics()
            await self._replay_job(job, None, warmup)

    async def _replay_job(self, job: PlannedJob, parent: str | None, warmup: bool) -> None:
        if warmup:
            self._warmup.job_ids.add(job.job_id)
        start_s = self._now()
        previous: TurnRecord | None = None
        error: str | None = None
        for index in range(job.num_turns):
            record, reply = await self._replay_turn(job, index, previous)
            if reply is None:
                error = record.error
                break
            previous = record
            await self._wait_for_tools(job, index, reply, warmup)
        self._finish(
            JobRecord(
                job_id=job.job_id,
                source=job.job.source,
                start_s=start_s,
                end_s=self._now(),
                num_turns=previous.turn if previous else 0,
                num_planned_turns=job.num_turns,
                num_recorded_turns=len(job.job.turns),
                parent_job=parent,
                warmup=warmup,
                error=error,
            )
        )

    async def _wait_for_tools(self, job: PlannedJob, index: int, reply: Reply, warmup: bool) -> None:
        """Waits for the tools as long as recorded, and for the sub-agents that the turn starts."""
        async with asyncio.TaskGroup() as group:
            if index < job.num_turns - 1:
                group.create_task(asyncio.sleep(job.gaps_s[index]))
                group.create_task(job.conversation.take(reply))
            for child in job.job.turns[index].spawns:
                # Each sub-agent is started once; one that was left out is not awaited.
                if child in self._sub_agents:
                    group.create_task(self._replay_job(self._sub_agents.pop(child), job.job_id, warmup))

    async def _replay_turn(
        self, job: PlannedJob, index: int, previous: TurnRecord | None
    ) -> tuple[TurnRecord, Reply | None]:
        turn = job.job.turns[index]
        is_last = index == job.num_turns - 1
        ask = job.conversation.ask(index)
        record = TurnRecord(
            job_id=job.job_id,
            turn=index + 1,
            start_s=self._now(),
            tool=turn.tool,
            command=turn.command,
            gap_s=None if is_last else job.gaps_s[index],
        )
        reply: Reply | None = None
        try:
            reply = await self._send(job, ask, is_last)
            _fill(record, ask, reply, previous)
        except (TurnFailedError, ServerGoneError) as error:
            record.error = str(error)
            record.latency_s = self._now() - record.start_s
            if isinstance(error, ServerGoneError):
                raise
        finally:
            if record.error is not None or reply is not None:
                self._add(record)
        return record, reply

    async def _send(self, job: PlannedJob, ask: Ask, is_last: bool) -> Reply:
        request = TurnRequest(
            prompt=ask.prompt,
            max_tokens=ask.max_tokens,
            forced_token_ids=ask.forced_token_ids,
            job_id=f"{job.job_id}.{self._run_id}",
            is_last_step=is_last,
            tools=job.tools,
        )
        return await self._client.send(request, self._speech.server_type, self._speech.identity)

    def _add(self, record: TurnRecord) -> None:
        self.turns.append(record)
        self._journal.add(record)
        self._count(record)

    def _finish(self, record: JobRecord) -> None:
        self.jobs.append(record)
        self._journal.add(record)
        self.progress.jobs_done += 1

    def _count(self, record: TurnRecord) -> None:
        self.progress.turns_done += 1
        self.progress.prompt_tokens += record.prompt_tokens
        self.progress.cached_tokens += record.cached_tokens or 0
        self.progress.output_tokens += record.output_tokens
        self.progress.errors += record.error is not None


def _fill(record: TurnRecord, ask: Ask, reply: Reply, previous: TurnRecord | None) -> None:
    """Fills the record from the response."""
    record.latency_s = reply.latency_s
    record.ttft_s = reply.ttft_s
    record.prompt_tokens = reply.prompt_tokens
    record.cached_tokens = reply.cached_tokens
    if reply.receipt is not None:
        record.recomputed_tokens = reply.receipt.recomputed_tokens
    if record.recomputed_tokens is None and reply.cached_tokens is not None:
        record.recomputed_tokens = recomputed_tokens(
            previous, reply.prompt_tokens, reply.cached_tokens, ask.prefix_tokens
        )
    record.output_tokens = reply.output_tokens
    record.finish_reason = reply.finish_reason
    record.as_recorded = ask.is_answered_as_recorded(reply)
    record.receipt = reply.receipt


def _first(errors: ExceptionGroup[ServerError]) -> ServerError:
    """Returns the first error; all are alike."""
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, ExceptionGroup) else inner
