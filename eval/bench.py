"""``continuum bench``: replays agent jobs against a running server and says what they experienced.

Speaks plain OpenAI chat over HTTP, so another engine can be measured in the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from eval.arguments import amount, count, count_or_all, positive
from eval.client import Reply, ServerClient, TurnFailedError, TurnRequest
from eval.metrics import RunResult, RunSetting, summarise
from eval.plan import Limits, PlannedJob, PlannedTurn, Planner, conversation
from eval.progress import Progress, shown
from eval.records import JobRecord, TurnRecord, recomputed_tokens, write_records
from eval.report import render
from eval.results import ResultFile, read_results, write_results
from eval.server_metrics import ServerMetrics
from eval.workloads.catalog import load_jobs
from eval.workloads.job import Job, describe_gaps

SETTLE_S = 10.0
"""How long the server may take to become idle after the last answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to replay against what."""

    base_url: str
    jobs: list[Job]
    name: str = "result"
    workload: str = ""
    """What the jobs are called in the result."""
    concurrency: int | None = None
    """Most jobs at once; None means all."""
    arrivals_per_s: float | None = None
    """Mean rate of Poisson arrivals; None means that all jobs are there at the start."""
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    """Of the arrivals."""
    send_job_id: bool = True
    model: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class BenchRun:
    """A result and the turns it was made from."""

    result: RunResult
    turns: list[TurnRecord]


class Replay:
    """One run of all planned jobs. Collects a record of every turn and every job."""

    def __init__(self, client: ServerClient, plans: list[PlannedJob], options: BenchOptions) -> None:
        self._client = client
        self._plans = plans
        self._options = options
        # A server remembers jobs: the same one in a second run must not be taken for a continuation.
        self._run_id = os.urandom(3).hex()
        self._slots = asyncio.Semaphore(options.concurrency or len(plans))
        self._started = 0.0
        self.turns: list[TurnRecord] = []
        self.jobs: list[JobRecord] = []
        self.progress = Progress(options.name, len(plans), sum(len(plan.turns) for plan in plans))

    async def run(self) -> None:
        """Replay all jobs to their ends."""
        arrivals = self._arrivals_s()
        self._started = time.perf_counter()
        async with shown(self.progress, self._client), asyncio.TaskGroup() as group:
            for plan, arrival_s in zip(self._plans, arrivals, strict=True):
                group.create_task(self._replay_job(plan, arrival_s))

    def _arrivals_s(self) -> list[float]:
        rate = self._options.arrivals_per_s
        if rate is None:
            return [0.0] * len(self._plans)
        rng = random.Random(self._options.seed)
        times, now = [], 0.0
        for _ in self._plans:
            times.append(now)
            now += rng.expovariate(rate)
        return times

    def _now(self) -> float:
        return time.perf_counter() - self._started

    async def _replay_job(self, plan: PlannedJob, arrival_s: float) -> None:
        await asyncio.sleep(arrival_s)
        async with self._slots:
            start_s = self._now()
            previous: TurnRecord | None = None
            for index, turn in enumerate(plan.turns):
                record = await self._replay_turn(plan, index, previous)
                self.turns.append(record)
                self._count(record)
                if record.error is not None:
                    break
                previous = record
                if record.gap_s is not None:
                    await asyncio.sleep(turn.gap_s)
            self._finish(plan, start_s, previous, record.error)

    def _finish(self, plan: PlannedJob, start_s: float, last: TurnRecord | None, error: str | None) -> None:
        self.progress.jobs_done += 1
        self.jobs.append(
            JobRecord(
                job_id=plan.job_id,
                start_s=start_s,
                end_s=self._now(),
                num_turns=last.turn if last else 0,
                num_planned_turns=len(plan.turns),
                num_recorded_turns=plan.num_recorded_turns,
                error=error,
            )
        )

    async def _replay_turn(self, plan: PlannedJob, index: int, previous: TurnRecord | None) -> TurnRecord:
        turn = plan.turns[index]
        is_last = index == len(plan.turns) - 1
        request = TurnRequest(
            messages=conversation(plan.system_text, plan.turns[:index], turn.recorded.input_text or ""),
            replay_token_ids=turn.replay_token_ids,
            job_id=f"{plan.job_id}.{self._run_id}" if self._options.send_job_id else None,
            is_last_step=is_last,
        )
        record = TurnRecord(
            job_id=plan.job_id,
            turn=index + 1,
            start_s=self._now(),
            tool=turn.recorded.tool,
            command=turn.recorded.command,
            gap_s=None if is_last else turn.gap_s,
        )
        try:
            reply = await self._client.chat(request)
        except TurnFailedError as error:
            record.error = str(error)
            record.latency_s = self._now() - record.start_s
            return record
        return _filled(record, turn, reply, previous)

    def _count(self, record: TurnRecord) -> None:
        self.progress.turns_done += 1
        self.progress.prompt_tokens += record.prompt_tokens
        self.progress.cached_tokens += record.cached_tokens
        self.progress.output_tokens += record.output_tokens
        self.progress.errors += record.error is not None


def _filled(record: TurnRecord, turn: PlannedTurn, reply: Reply, previous: TurnRecord | None) -> TurnRecord:
    """The record with what the answer brought."""
    record.latency_s = reply.latency_s
    record.ttft_s = reply.ttft_s
    record.prompt_tokens = reply.prompt_tokens
    record.cached_tokens = reply.cached_tokens
    record.recomputed_tokens = recomputed_tokens(previous, reply.prompt_tokens, reply.cached_tokens)
    record.output_tokens = reply.output_tokens
    record.finish_reason = reply.finish_reason
    record.as_recorded = reply.text == turn.output_text
    record.receipt = reply.receipt
    return record


async def run_bench(options: BenchOptions) -> BenchRun:
    """Plan, replay and sum up."""
    async with ServerClient(options.base_url, model=options.model, timeout_s=options.timeout_s) as client:
        info = await client.connect()
        _say(f"{options.name}: preparing {len(options.jobs)} jobs for {info.model} at {client.base_url}")
        limits = replace(options.limits, max_context_tokens=_context(options.limits, info.max_model_len))
        plans = await Planner(client, limits).plan(options.jobs)
        before = await client.metrics()
        replay = Replay(client, plans, options)
        await replay.run()
        after = await _settled_metrics(client)
    result = summarise(
        _setting(options, info.model),
        replay.jobs,
        replay.turns,
        after.counters_since(before),
        notes=_notes(options, plans),
        detail=True,
    )
    return BenchRun(result, replay.turns)


def _setting(options: BenchOptions, model: str) -> RunSetting:
    return RunSetting(
        name=options.name,
        model=model,
        workload=options.workload,
        seed=options.seed,
        jobs_per_s=options.arrivals_per_s,
        concurrency=options.concurrency,
    )


def _context(limits: Limits, max_model_len: int | None) -> int | None:
    known = [limit for limit in (limits.max_context_tokens, max_model_len) if limit is not None]
    return min(known, default=None)


async def _settled_metrics(client: ServerClient) -> ServerMetrics:
    """The metrics once nothing runs any more: gauges and pins lag behind the last answer."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        metrics = await client.metrics()
        if (metrics.idle and not metrics.pins) or time.monotonic() > deadline:
            return metrics
        await asyncio.sleep(0.2)


def _notes(options: BenchOptions, plans: list[PlannedJob]) -> list[str]:
    """What of this run is assumed or changed, for the report."""
    limits = options.limits
    waited_for = (turn.recorded for plan in plans for turn in plan.turns[:-1])
    cap = "" if limits.gap_cap_s is None else f", at most {limits.gap_cap_s:g} s"
    notes = [f"{describe_gaps(waited_for)}; replayed at {limits.time_scale:g}x{cap}"]
    if options.arrivals_per_s is None:
        notes.append("job arrivals: ASSUMED, all at the start")
    else:
        notes.append(f"job arrivals: ASSUMED, Poisson with {options.arrivals_per_s:g} per s")
    if limits.max_output_tokens is not None:
        notes.append(f"outputs shortened to at most {limits.max_output_tokens} tokens")
    if not options.send_job_id:
        notes.append("no job ids were sent")
    return notes


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``continuum bench``."""
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="the server under test")
    add("--workload", required=True, metavar="FILE", help="recorded jobs, or 'synthetic' for made ones")
    add("--jobs", type=count, metavar="N", help="replay N jobs; all by default")
    add("--concurrency", type=count_or_all, metavar="N|all", help="most jobs at once; all by default")
    add("--arrivals-per-s", type=positive, metavar="R", help="Poisson arrivals; by default all at the start")
    add("--time-scale", type=amount, default=1.0, metavar="X", help="multiply the recorded tool times")
    add("--gap-cap-s", type=amount, metavar="S", help="longest tool time, after scaling")
    add("--max-turns", type=count, metavar="N", help="replay the first N turns of each job")
    add("--max-output-tokens", type=count, metavar="N", help="shorten outputs, keeping the command")
    add(
        "--max-context-tokens", type=count, metavar="N", help="cut jobs where prompt plus output would pass N"
    )
    add("--seed", type=int, help="draw the jobs and arrivals at random; by default the file's order")
    add("--model", metavar="NAME", help="the served model; the server's first by default")
    add("--no-job-id", action="store_true", help="send no job ids, as an agent that knows nothing of us")
    add("--timeout-s", type=positive, default=600.0, metavar="S", help="longest silence within one answer")
    add("--name", default="result", help="how the report calls this run")
    add("--json", type=Path, metavar="OUT", help="write the result there")
    add("--records", type=Path, metavar="OUT.jsonl", help="write one line per turn there")
    add("--against", type=Path, metavar="RESULT.json", help="print an earlier result beside this one")


def _options(arguments: argparse.Namespace) -> BenchOptions:
    return BenchOptions(
        base_url=arguments.base_url,
        jobs=load_jobs(arguments.workload, arguments.jobs, arguments.seed),
        name=arguments.name,
        workload=Path(arguments.workload).name,
        concurrency=arguments.concurrency,
        arrivals_per_s=arguments.arrivals_per_s,
        limits=Limits(
            max_turns=arguments.max_turns,
            max_output_tokens=arguments.max_output_tokens,
            max_context_tokens=arguments.max_context_tokens,
            time_scale=arguments.time_scale,
            gap_cap_s=arguments.gap_cap_s,
        ),
        seed=arguments.seed or 0,
        send_job_id=not arguments.no_job_id,
        model=arguments.model,
        timeout_s=arguments.timeout_s,
    )


def run(arguments: argparse.Namespace) -> int:
    """``continuum bench``. Exit code 1 if a turn failed; what cannot be read or reached is raised."""
    earlier = read_results(arguments.against).runs if arguments.against else []
    bench = asyncio.run(run_bench(_options(arguments)))
    if arguments.json:
        write_results(arguments.json, ResultFile(title=bench.result.name, runs=[bench.result]))
    if arguments.records:
        write_records(arguments.records, bench.turns)
    print(render([*earlier, bench.result]))
    return report_errors(bench)


def report_errors(run: BenchRun) -> int:
    """Say what went wrong in a run; the exit code it deserves."""
    failed = [turn for turn in run.turns if turn.error is not None]
    for turn in failed[:5]:
        _say(f"error: {run.result.name}, job {turn.job_id}, turn {turn.turn}: {turn.error}")
    return 1 if failed else 0
