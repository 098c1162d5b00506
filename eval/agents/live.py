"""Runs live agents against a server, many at once: real requests, and real tools with recorded durations.

It writes the same records as a replay, so the same reports can be made. Knows no command line.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eval.agent_model import MAX_REPLY_TOKENS
from eval.agent_model.tasks import Task
from eval.agents.agent import Agent, AgentRun, AgentTurn, Ending, Event, ReplyCame
from eval.agents.http_model import HttpModel
from eval.agents.model import ChatModel, Sampling
from eval.agents.sandbox import folder_of
from eval.agents.tool_latency import RecordedDelays
from eval.agents.tools import Toolbox
from eval.load.bench_run import BenchRun, settled_metrics
from eval.load.client import ServerClient
from eval.load.journal import Journal
from eval.load.progress import Progress, shown
from eval.load.records import JobRecord, RunHeader, TurnRecord, recomputed_tokens
from eval.report.metrics import RunSetting, summarize

SOURCE = "live agents"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """The tasks, the server and how agents run."""

    base_url: str
    name: str
    """Name of the result: the policy."""
    tasks: Sequence[Task]
    concurrency: int
    """Number of concurrent agents; each takes the next task when it has finished one."""
    seed: int = 0
    """Random seed of the tool times."""
    time_scale: float = 1.0
    """Factor on the tool times."""
    records: Path | None = None
    """File of records, written as turns end."""


async def run_live(options: LiveOptions) -> BenchRun:
    """Runs the agents to the end. Raises ServerGoneError, or ResultError if records cannot be written."""
    async with ServerClient(options.base_url) as client:
        info = await client.connect()
        model = HttpModel(client, Sampling(max_tokens=MAX_REPLY_TOKENS))
        header = RunHeader(
            settings={"tasks": str(len(options.tasks)), "concurrency": str(options.concurrency)}
        )
        with Journal(options.records, header, None) as journal:
            work = _Work(options, model, journal)
            before = await client.metrics()
            async with shown(work.progress, client):
                await work.run()
        after = await settled_metrics(client)
    setting = RunSetting(
        name=options.name,
        model=info.model,
        workload=SOURCE,
        seed=options.seed,
        concurrency=options.concurrency,
    )
    result = summarize(
        setting, work.jobs, work.turns, after.counters_since(before), notes=_notes(options), detail=True
    )
    result.num_solved = work.num_solved
    return BenchRun(result, work.turns, records_broken=journal.broken)


@dataclass(slots=True)
class _Work:
    """The tasks of one run and their outcomes."""

    options: LiveOptions
    model: ChatModel
    journal: Journal
    jobs: list[JobRecord] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    num_solved: int = 0
    progress: Progress = field(init=False)
    _started: float = 0.0

    def __post_init__(self) -> None:
        num_turns = sum(len(task.rounds) + 1 for task in self.options.tasks)
        self.progress = Progress(self.options.name, len(self.options.tasks), num_turns)

    async def run(self) -> None:
        self._started = time.perf_counter()
        waiting = iter(self.options.tasks)
        async with asyncio.TaskGroup() as group:
            for _ in range(self.options.concurrency):
                group.create_task(self._agent(waiting))

    async def _agent(self, waiting: Iterator[Task]) -> None:
        for task in waiting:
            await self._do(task)

    async def _do(self, task: Task) -> None:
        start_s = time.perf_counter() - self._started
        with folder_of(task.files) as root:
            agent = Agent(
                model=self.model,
                tools=Toolbox(root),
                max_turns=task.max_turns,
                delay_of=RecordedDelays(f"{self.options.seed} {task.task_id}", self.options.time_scale),
                watch=self._see,
            )
            run = await agent.ask(task.prompt)
            solved = run.ending is Ending.ANSWERED and task.check(run.answer, root)
        self.num_solved += solved
        self._record(task, start_s, run)

    def _record(self, task: Task, start_s: float, run: AgentRun) -> None:
        records = _turn_records(task.task_id, start_s, run)
        for record in records:
            self.journal.add(record)
        self.turns += records
        job = JobRecord(
            job_id=task.task_id,
            source=SOURCE,
            start_s=start_s,
            end_s=start_s + run.seconds,
            num_turns=len(run.turns),
            num_planned_turns=len(records),
            num_recorded_turns=len(records),
            error=run.error,
        )
        self.jobs.append(job)
        self.journal.add(job)
        self.progress.jobs_done += 1
        self.progress.errors += run.error is not None

    def _see(self, event: Event) -> None:
        if isinstance(event, ReplyCame):
            self.progress.turns_done += 1
            self.progress.prompt_tokens += event.reply.prompt_tokens
            self.progress.cached_tokens += event.reply.cached_tokens or 0
            self.progress.output_tokens += event.reply.output_tokens


def _turn_records(job_id: str, job_start_s: float, run: AgentRun) -> list[TurnRecord]:
    """Returns a record per turn; a failed request comes last."""
    records: list[TurnRecord] = []
    for turn in run.turns:
        records.append(_turn_record(job_id, job_start_s, turn, records[-1] if records else None))
    if run.error is not None:
        number = len(records) + 1
        records.append(
            TurnRecord(job_id=job_id, turn=number, start_s=job_start_s + run.seconds, error=run.error)
        )
    return records


def _turn_record(job_id: str, job_start_s: float, turn: AgentTurn, previous: TurnRecord | None) -> TurnRecord:
    reply = turn.reply
    cached_tokens = reply.cached_tokens or 0
    slowest = max(turn.results, key=lambda result: result.seconds, default=None)
    return TurnRecord(
        job_id=job_id,
        turn=turn.number,
        start_s=job_start_s + turn.start_s,
        latency_s=reply.latency_s,
        ttft_s=reply.ttft_s,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=cached_tokens,
        recomputed_tokens=recomputed_tokens(previous, reply.prompt_tokens, cached_tokens),
        output_tokens=reply.output_tokens,
        finish_reason=reply.finish_reason,
        as_recorded=True,  # there is no recording to differ from
        tool=slowest.call.name if slowest else None,
        gap_s=turn.gap_s if turn.results else None,
        receipt=reply.receipt,
    )


def _notes(options: LiveOptions) -> list[str]:
    scale = "" if options.time_scale == 1.0 else f", at {options.time_scale:g}x"
    return [
        f"live agents: the model's own calls, carried out; {options.concurrency} at once",
        "a call takes at least as long as one of its kind took in recorded agent jobs (agentcgroup)" + scale,
        "no job ids were sent",
    ]
