"""One measurement of a running server: plans the jobs, replays them, summarizes. Knows no command line."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from eval.errors import ServerError, UsageError
from eval.load.client import TIMEOUT_S, ServerClient, ServerInfo
from eval.load.journal import Journal, resumable
from eval.load.planner import Api, Limits, Plan, Planner, PlanOptions, Replies
from eval.load.records import Recording, RunHeader, TurnRecord
from eval.load.replay import Pacing, Replay, Speech
from eval.load.server_metrics import ServerMetrics
from eval.load.server_type import Identity, ServerType
from eval.load.tool_call_text import CallStyle
from eval.report.metrics import RunResult, RunSetting, summarize
from eval.say import say
from eval.workloads.arrivals import Arrivals
from eval.workloads.catalog import Workload, short_name
from eval.workloads.job import Job
from eval.workloads.provenance import describe
from eval.workloads.sampling import JobLimits, Sample

SETTLE_S = 10.0
"""Time that the server may take to become idle after the last answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Which jobs to replay against which server, and how."""

    base_url: str
    workload: Workload
    num_jobs: int | None = None
    """Number of jobs without sub-agents; None: all, or the workload's default."""
    draw_seed: int | None = None
    """Random seed of the job sample; None: in the workload's order."""
    name: str = "result"
    limits: Limits = field(default_factory=Limits)
    api: Api | None = None
    replies: Replies | None = None
    """Source of the responses; None: forced where the server supports it, else live."""
    calls: CallStyle = CallStyle.FENCED
    seed: int = 0
    """Random seed of synthetic prompts and of arrivals."""
    token_ids: range | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)
    warmup_jobs: int = 0
    warmup_s: float = 0.0
    server_type: ServerType | None = None
    """Kind of server; None: according to its model card."""
    identity: Identity | None = None
    """How requests name their job; None: the default of the server type."""
    model: str | None = None
    timeout_s: float = TIMEOUT_S
    api_key: str | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)
    retry_busy: bool = False
    reset_prefix_cache: bool = False
    """Reset the server's prefix cache first, as synthetic prompts of one seed are always the same."""
    records: Path | None = None
    """File of records, written as turns end."""
    resume: bool = False
    """Resume the run of which ``records`` holds an earlier part."""


@dataclass(frozen=True, slots=True)
class BenchRun:
    """A result and the turns it was made from."""

    result: RunResult
    turns: list[TurnRecord]
    interrupted: bool = False
    gone: str | None = None
    """Why the run ended before its jobs did, if the server was the cause."""
    records_broken: str | None = None
    """Why the file of records is incomplete, if it is."""


async def run_bench(options: BenchOptions) -> BenchRun:
    """Plans, replays and summarizes. Ctrl-C ends the replay; the part that ran is still summarized.

    Raises ServerError or WorkloadError if nothing can be measured, ResultError if ``records`` cannot be used.
    """
    client = ServerClient(
        options.base_url,
        model=options.model,
        timeout_s=options.timeout_s,
        api_key=options.api_key,
        extra_body=options.extra_body,
        retry_busy=options.retry_busy,
    )
    async with client:
        info = await client.connect()
        options = _completed(options, info)
        sample = _sample(options)
        say(f"{options.name}: preparing {len(sample.jobs)} jobs for {info.model} at {client.base_url}")
        plan = await Planner(client, _plan_options(options)).plan(sample.jobs)
        if options.warmup_jobs >= len(plan.roots):
            raise UsageError(
                f"--warmup-jobs {options.warmup_jobs} leaves none of {len(plan.roots)} jobs to count."
            )
        _refuse_endless_warmup(options, plan)
        plan.notes[:0] = [*sample.notes, *describe([job.job for job in plan.jobs])]
        header = RunHeader(settings=_settings(options, info, plan.api, sample.jobs))
        kept = _kept(options, header)
        if options.reset_prefix_cache:
            await client.reset_prefix_cache()
        with Journal(options.records, header, kept) as journal:
            return await _replay(client, options, info, plan, journal, kept)


def _sample(options: BenchOptions) -> Sample:
    """Draws the jobs. If only token counts are used, leaves out jobs that are too long before the draw."""
    limit = options.limits.max_context_tokens
    sample = options.workload.sample(options.num_jobs, options.draw_seed)
    told_by_counts = options.api is Api.COMPLETIONS or not all(job.has_text for job in sample.jobs)
    if limit is None or not told_by_counts:
        return sample
    within = JobLimits(max_context_tokens=limit, cut_at_context=True)
    return options.workload.sample(options.num_jobs, options.draw_seed, within)


def _refuse_endless_warmup(options: BenchOptions, plan: Plan) -> None:
    """Raises UsageError if all jobs arrive before the warm-up ends; unknown with a bounded concurrency."""
    if options.arrivals.concurrency is not None:
        return
    last_s = max(options.arrivals.times_s([root.job for root in plan.roots], options.seed), default=0.0)
    if last_s < options.warmup_s:
        raise UsageError(
            f"--warmup-s {options.warmup_s:g} leaves none of {len(plan.roots)} jobs to count: the last one "
            f"arrives after {last_s:.1f} s."
        )


async def _replay(
    client: ServerClient,
    options: BenchOptions,
    info: ServerInfo,
    plan: Plan,
    journal: Journal,
    kept: Recording | None,
) -> BenchRun:
    assert options.server_type is not None
    assert options.identity is not None
    replay = Replay(
        client,
        plan,
        Pacing(
            arrivals_s=options.arrivals.times_s([root.job for root in plan.roots], options.seed),
            concurrency=options.arrivals.concurrency,
            warmup_jobs=options.warmup_jobs,
            warmup_s=options.warmup_s,
        ),
        Speech(options.server_type, options.identity),
        journal=journal,
        name=options.name,
        kept=kept,
    )
    interrupted = await _run_until_interrupted(replay)
    after = await (client.metrics() if interrupted else settled_metrics(client))
    before = replay.metrics_before or after
    notes = [*_notes(options, plan, replay), *_how_it_went(replay, kept, interrupted)]
    jobs, turns = replay.counted()
    counters = after.counters_since(before)
    result = summarize(_setting(options, info.model), jobs, turns, counters, notes=notes, detail=True)
    gone = None
    if replay.gone is not None:
        ended = replay.progress
        gone = f"{replay.gone} {ended.jobs_done} of {ended.num_jobs} jobs had ended."
    return BenchRun(result, turns, interrupted, gone, journal.broken)


async def _run_until_interrupted(replay: Replay) -> bool:
    """Runs the replay; returns whether Ctrl-C ended it. A second Ctrl-C ends the program."""
    task = asyncio.ensure_future(replay.run())
    with _cancelled_by_sigint(task) as pressed:
        try:
            await task
        except asyncio.CancelledError:
            if not pressed.is_set():
                raise
    return pressed.is_set()


@contextmanager
def _cancelled_by_sigint(task: asyncio.Future[None]) -> Iterator[asyncio.Event]:
    """Within the block, the first Ctrl-C cancels ``task`` and sets the event."""
    loop = asyncio.get_running_loop()
    pressed = asyncio.Event()

    def press() -> None:
        pressed.set()
        loop.remove_signal_handler(signal.SIGINT)
        task.cancel()

    with suppress(ValueError, RuntimeError):  # not in the main thread: its owner handles signals
        loop.add_signal_handler(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _completed(options: BenchOptions, info: ServerInfo) -> BenchOptions:
    """Fills in the options that depend on the server: server type, identity, replies, context.

    Raises ServerError for forced replies if the server does not support them.
    """
    server_type = options.server_type or info.server_type
    known = [limit for limit in (options.limits.max_context_tokens, info.max_model_len) if limit is not None]
    replies = options.replies or (Replies.FORCED if server_type.forces_tokens else Replies.LIVE)
    if replies is Replies.FORCED and not server_type.forces_tokens:
        raise ServerError(
            f"--replies forced needs a server that takes replay_token_ids, not {server_type.name!r}."
        )
    return replace(
        options,
        server_type=server_type,
        identity=options.identity or server_type.default_identity,
        replies=replies,
        limits=replace(options.limits, max_context_tokens=min(known, default=None)),
    )


def _plan_options(options: BenchOptions) -> PlanOptions:
    assert options.replies is not None
    return PlanOptions(
        limits=options.limits,
        api=options.api,
        replies=options.replies,
        calls=options.calls,
        seed=options.seed,
        token_ids=options.token_ids,
    )


def _kept(options: BenchOptions, header: RunHeader) -> Recording | None:
    """Returns the records of an earlier part of this run; None if it starts from the beginning."""
    if not options.resume or options.records is None or not options.records.exists():
        return None
    kept = resumable(options.records, header)
    cut = "; its last line was cut off and is dropped" if kept.was_cut else ""
    say(f"{options.name}: resuming, {len(kept.jobs)} jobs are done already{cut}")
    return kept


def _setting(options: BenchOptions, model: str) -> RunSetting:
    return RunSetting(
        name=options.name,
        model=model,
        workload=short_name(options.workload.name),
        seed=options.seed,
        jobs_per_s=options.arrivals.rate_per_s,
        concurrency=options.arrivals.concurrency,
        arrivals=options.arrivals.pattern,
    )


def _settings(options: BenchOptions, info: ServerInfo, api: Api, jobs: Sequence[Job]) -> dict[str, str]:
    """Returns every setting that decides what is sent and when, as text; not the server's address."""
    assert options.server_type is not None
    limits = options.limits
    content = blake2b(digest_size=8)
    for job in jobs:
        content.update(msgspec.json.encode(job))
    settings = {
        "workload": f"{options.workload.name} ({len(jobs)} jobs, {content.hexdigest()})",
        "model": info.model,
        "--server": options.server_type.name,
        "--api": api,
        "--replies": options.replies,
        "--calls": options.calls,
        "--identity": options.identity,
        "--seed": options.seed,
        "--token-ids": options.token_ids,
        "--arrivals": options.arrivals.kind,
        "--rate": options.arrivals.rate_per_s,
        "--burstiness": options.arrivals.cv,
        "--concurrency": options.arrivals.concurrency,
        "--warmup-jobs": options.warmup_jobs,
        "--warmup-s": options.warmup_s,
        "--max-turns": limits.max_turns,
        "--max-output-tokens": limits.max_output_tokens,
        "--max-context-tokens": limits.max_context_tokens,
        "--time-scale": limits.time_scale,
        "--gap-cap-s": limits.gap_cap_s,
        "--extra-body": msgspec.json.encode(options.extra_body, order="sorted").decode(),
    }
    return {name: str(value) for name, value in settings.items()}


async def settled_metrics(client: ServerClient) -> ServerMetrics:
    """Returns the metrics once the server is idle: gauges and pins lag behind the last response."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        metrics = await client.metrics()
        if (metrics.idle and not metrics.pins) or time.monotonic() > deadline:
            return metrics
        await asyncio.sleep(0.2)


def _notes(options: BenchOptions, plan: Plan, replay: Replay) -> list[str]:
    """Returns notes for the report on what this run assumes or changes."""
    limits = options.limits
    cap = "" if limits.gap_cap_s is None else f", at most {limits.gap_cap_s:g} s"
    notes = [
        *plan.notes,
        f"gaps are replayed at {limits.time_scale:g}x{cap}",
        options.arrivals.describe(),
    ]
    if limits.max_output_tokens is not None:
        notes.append(f"outputs shortened to at most {limits.max_output_tokens} tokens")
    if options.replies is Replies.LIVE:
        notes.append("responses are the model's own, as many tokens as recorded; they go into the history")
        if options.server_type is not None and not options.server_type.fixes_length:
            notes.append("the server was not asked for exactly that number: responses may be shorter")
    if options.identity is Identity.NONE:
        notes.append("no job ids were sent")
    elif options.identity is not Identity.JOB_ID:
        notes.append(f"jobs were named by {options.identity}, without their last turns")
    if replay.num_warmup_jobs:
        notes.append(f"warm-up: {replay.num_warmup_jobs} jobs were replayed first and are not counted")
    answered = [turn for turn in replay.turns if turn.error is None]
    if uncounted := sum(not turn.prompt_tokens for turn in answered):
        of_all = f"{uncounted} of {len(answered)} responses"
        notes.append(f"the server reported no token counts for {of_all}: they count as 0")
    if answered and all(turn.cached_tokens is None for turn in answered):
        notes.append("the server reported no cached tokens: cached and recomputed tokens are unknown, not 0")
    return notes


def _how_it_went(replay: Replay, kept: Recording | None, interrupted: bool) -> list[str]:
    """Notes on an interrupted or resumed run."""
    notes = []
    if kept is not None:
        notes.append(
            f"resumed: {len(kept.jobs)} jobs are from an earlier part; the server's counters cover only "
            "the later one"
        )
    ended = replay.progress.jobs_done
    planned = replay.progress.num_jobs
    if replay.num_warmup_jobs and not any(not job.warmup for job in replay.jobs):
        notes.append("the warm-up lasted until the end: NOTHING is counted")
    if interrupted:
        notes.append(f"INTERRUPTED after {ended} of {planned} jobs")
    if replay.gone is not None:
        notes.append(f"ENDED EARLY after {ended} of {planned} jobs: {replay.gone}")
    return notes
