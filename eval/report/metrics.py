"""Summarizes a run: distributions, rates, token counts, ends of pins. Pure arithmetic on records.

Knows neither files nor tables; simulated and real runs are summarized in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from eval.load.records import EngineCounters, JobRecord, Occupancy, TurnRecord, VerifiedDrafts
from eval.trace.analysis.distribution import Distribution

TTFT_LIMIT_S = 30.0
"""Default limit of goodput."""
MAX_DETAIL_JOBS = 30
"""Jobs whose turns are kept for a plot."""
MAX_DETAIL_SAMPLES = 500
"""Samples of the pool's occupancy kept for a plot."""
HANDED_OVER = "handed_over"
"""The cause with which a useful pin ends."""


class RunSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What was run: one policy or server, one load, one seed."""

    name: str
    """Name of the policy or the server."""
    model: str
    simulated: bool = False
    workload: str = ""
    seed: int | None = None
    """Random seed of jobs and arrivals; None: nothing was drawn."""
    jobs_per_s: float | None = None
    """Mean arrival rate; None: all jobs arrive at the start, or their arrivals are recorded."""
    concurrency: int | None = None
    """Maximum number of concurrent jobs; None: no bound."""
    arrivals: str | None = None
    """The kind of arrivals if the rate does not define it, such as bursty or recorded."""
    num_replicas: int = 1
    hardware: str | None = None


class TurnSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One turn in a plot: waiting, then running. The job's tool call fills the time to its next turn."""

    job_id: str
    turn: int
    start_s: float
    wait_s: float
    """Seconds in the queue, if known, else to the first token."""
    end_s: float
    tool: str | None = None
    """The tool that the job waits for afterwards."""


class RunResult(msgspec.Struct, kw_only=True):
    """One run in numbers. Failed turns count in ``num_errors`` only."""

    setting: RunSetting
    num_jobs: int
    """Number of jobs; a sub-agent is part of the job that started it."""
    num_completed_jobs: int
    num_cut_jobs: int
    """Number of jobs that were cut at a limit."""
    num_turns: int
    """Turns that were answered."""
    num_errors: int
    """Number of failed turns."""
    num_unlike_recording: int
    """Number of responses that differ from the recorded text, as the server does not force tokens."""
    wall_s: float
    """Time from the first job's arrival to the last one's end, on the run's own clock."""
    job_completion_s: Distribution | None
    """Times of completed jobs from arrival to last response, including tool calls."""
    jobs_per_hour: float | None
    """Completed jobs per hour of ``wall_s``."""
    ttft_s: Distribution | None
    first_ttft_s: Distribution | None
    """TTFT of the first turns of jobs."""
    returning_ttft_s: Distribution | None
    """TTFT of all later turns, which return from a tool."""
    tpot_s: Distribution | None = None
    """Times per output token after the first, by turn."""
    longest_wait_s: float | None
    """Longest time of a turn in the queue; if unknown, to its first token."""
    ttft_limit_s: float
    goodput_turns_per_s: float | None
    """Turns whose TTFT is within the limit, over ``wall_s``."""
    goodput_tokens_per_s: float | None
    """Output tokens of those turns, over ``wall_s``."""
    output_tokens_per_s: float | None
    prompt_tokens: int
    cached_tokens: int | None
    """None if the server reported it for no turn; also the next three."""
    hit_rate: float | None
    """Cached tokens over prompt tokens."""
    computed_prefill_tokens: int | None
    """The engine's count, else prompt minus cached tokens, which misses the work of preempted turns."""
    recomputed_tokens: int | None
    """Prompt tokens that the job's previous turn had and that were no longer cached."""
    output_tokens: int
    num_preemptions: int | None
    """Number of preemptions; None if the server does not report it."""
    num_pinned_turns: int | None
    """Number of turns whose receipt reports a pin; None if no turn got a receipt."""
    pins_ended: dict[str, int]
    """Number of pins by the cause of their end."""
    held_in_vain_token_s: float | None
    """Wasted retention: pinned KV tokens times seconds that no turn took over; None without a block size."""
    held_in_vain_share: float | None
    """Wasted retention as a share of pool times ``wall_s``; None if the pool size is unknown."""
    host_tokens_loaded: int | None = None
    """Tokens whose KV was loaded back from host memory or disk."""
    disk_tokens_loaded: int | None = None
    """The part of these that was read from disk."""
    kv_usage_at_end: float | None = None
    """Share of the KV pool in use when all jobs had ended; anything but 0 is a leak."""
    drafts: VerifiedDrafts | None = None
    """Counts of drafts over all of the engine's requests; None if it does not draft."""
    job_tokens_per_step: Distribution | None = None
    """Output tokens per step, by job; None if no turn's receipt reports drafts."""
    num_solved: int | None = None
    """Number of tasks whose checker accepted the answer; None: the jobs are not tasks of live agents."""
    notes: list[str] = []
    """Which figures are measured and which assumed."""
    jobs: list[JobRecord] = []
    """All jobs, including sub-agents, in the order of their starts."""
    spans: list[TurnSpan] = []
    """Turns of some jobs, for a plot."""
    occupancy: Occupancy | None = None
    """The KV pool over time, for a plot."""

    @property
    def name(self) -> str:
        return self.setting.name

    @property
    def programs(self) -> list[JobRecord]:
        """The root jobs, which no other job started."""
        return [job for job in self.jobs if job.parent_job is None]


def summarize(
    setting: RunSetting,
    jobs: list[JobRecord],
    turns: list[TurnRecord],
    counters: EngineCounters,
    *,
    occupancy: Occupancy | None = None,
    notes: Sequence[str] = (),
    ttft_limit_s: float = TTFT_LIMIT_S,
    detail: bool = False,
) -> RunResult:
    """Summarizes one run. ``detail`` keeps data for plots: spans of some jobs, thinned occupancy."""
    answered = [turn for turn in turns if turn.error is None]
    in_time = [turn for turn in answered if turn.ttft_s is not None and turn.ttft_s <= ttft_limit_s]
    programs = [job for job in jobs if job.parent_job is None]
    completed = [job for job in programs if job.error is None]
    ttfts = [(turn.turn, turn.ttft_s) for turn in answered if turn.ttft_s is not None]
    prompt_tokens = sum(turn.prompt_tokens for turn in answered)
    cached_tokens = _sum_of_told(turn.cached_tokens for turn in answered)
    output_tokens = sum(turn.output_tokens for turn in answered)
    computed = counters.computed_prefill_tokens
    ordered = sorted(jobs, key=lambda job: (job.start_s, job.job_id))
    wall_s = max(job.end_s for job in jobs) - ordered[0].start_s if jobs else 0.0
    return RunResult(
        setting=setting,
        num_jobs=len(programs),
        num_completed_jobs=len(completed),
        num_cut_jobs=sum(job.num_planned_turns < job.num_recorded_turns for job in programs),
        num_turns=len(answered),
        num_errors=len(turns) - len(answered),
        num_unlike_recording=sum(not turn.as_recorded for turn in answered),
        wall_s=wall_s,
        job_completion_s=Distribution.of(job.completion_s for job in completed),
        jobs_per_hour=_over(3600 * len(completed), wall_s),
        ttft_s=Distribution.of(ttft_s for _, ttft_s in ttfts),
        first_ttft_s=Distribution.of(ttft_s for number, ttft_s in ttfts if number == 1),
        returning_ttft_s=Distribution.of(ttft_s for number, ttft_s in ttfts if number > 1),
        tpot_s=Distribution.of(_tpots_s(answered)),
        longest_wait_s=_longest_wait_s(answered),
        ttft_limit_s=ttft_limit_s,
        goodput_turns_per_s=_over(len(in_time), wall_s),
        goodput_tokens_per_s=_over(sum(turn.output_tokens for turn in in_time), wall_s),
        output_tokens_per_s=_over(output_tokens, wall_s),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        hit_rate=None if cached_tokens is None else _over(cached_tokens, prompt_tokens),
        computed_prefill_tokens=(
            prompt_tokens - cached_tokens if computed is None and cached_tokens is not None else computed
        ),
        recomputed_tokens=_sum_of_told(turn.recomputed_tokens for turn in answered),
        output_tokens=output_tokens,
        num_preemptions=counters.num_preemptions,
        num_pinned_turns=_num_pinned_turns(answered),
        pins_ended=counters.pins_ended,
        held_in_vain_token_s=_held_in_vain_token_s(counters),
        held_in_vain_share=_held_in_vain_share(counters, wall_s),
        host_tokens_loaded=counters.host_tokens_loaded,
        disk_tokens_loaded=counters.disk_tokens_loaded,
        kv_usage_at_end=counters.kv_usage_at_end,
        drafts=counters.drafts,
        job_tokens_per_step=_job_tokens_per_step(answered),
        notes=list(notes),
        jobs=ordered,
        spans=_spans(ordered, turns) if detail else [],
        occupancy=_thinned(occupancy) if detail and occupancy is not None else None,
    )


def _over(amount: float, whole: float) -> float | None:
    """Returns the quotient; None if the divisor is 0."""
    return amount / whole if whole > 0 else None


def _sum_of_told(counts: Iterable[int | None]) -> int | None:
    """Sums the known counts; None if no turn has one, as a server may omit counts that are 0."""
    told = [count for count in counts if count is not None]
    return sum(told) if told else None


def _num_pinned_turns(answered: list[TurnRecord]) -> int | None:
    receipts = [turn.receipt for turn in answered if turn.receipt is not None]
    return sum(receipt.ttl_s > 0 for receipt in receipts) if receipts else None


def _job_tokens_per_step(answered: list[TurnRecord]) -> Distribution | None:
    """Returns output tokens per step by job, from the receipts of its turns."""
    accepted: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    drafted = False
    for turn in answered:
        if turn.receipt is not None and turn.receipt.output_steps:
            steps[turn.job_id] += turn.receipt.output_steps
            accepted[turn.job_id] += turn.receipt.accepted_tokens
            drafted |= turn.receipt.drafted_tokens > 0
    if not drafted:
        return None
    return Distribution.of(1 + accepted[job_id] / num_steps for job_id, num_steps in steps.items())


def _tpots_s(answered: list[TurnRecord]) -> list[float]:
    """Each turn's time from its first token to its end, over its other tokens."""
    return [
        (turn.latency_s - turn.ttft_s) / (turn.output_tokens - 1)
        for turn in answered
        if turn.ttft_s is not None and turn.output_tokens > 1
    ]


def _longest_wait_s(answered: list[TurnRecord]) -> float | None:
    queued = [turn.queued_s for turn in answered if turn.queued_s is not None]
    return max(queued or [turn.ttft_s for turn in answered if turn.ttft_s is not None], default=None)


def _block_s_in_vain(counters: EngineCounters) -> float:
    return sum(block_s for cause, block_s in sorted(counters.pin_block_s.items()) if cause != HANDED_OVER)


def _held_in_vain_token_s(counters: EngineCounters) -> float | None:
    return None if counters.block_size is None else counters.block_size * _block_s_in_vain(counters)


def _held_in_vain_share(counters: EngineCounters, wall_s: float) -> float | None:
    if counters.num_blocks is None:
        return None
    return _over(_block_s_in_vain(counters), counters.num_blocks * wall_s)


def _spans(jobs: list[JobRecord], turns: list[TurnRecord]) -> list[TurnSpan]:
    """Turns of the jobs in the middle of the run, where the load is neither building up nor draining."""
    first = max(0, (len(jobs) - MAX_DETAIL_JOBS) // 2)
    kept = {job.job_id for job in jobs[first : first + MAX_DETAIL_JOBS]}
    spans = [
        TurnSpan(
            job_id=turn.job_id,
            turn=turn.turn,
            start_s=turn.start_s,
            wait_s=_wait_s(turn),
            end_s=turn.start_s + turn.latency_s,
            tool=turn.tool,
        )
        for turn in turns
        if turn.job_id in kept
    ]
    return sorted(spans, key=lambda span: (span.start_s, span.job_id, span.turn))


def _wait_s(turn: TurnRecord) -> float:
    """Returns the seconds that a turn waited; a failed turn counts as waiting all its time."""
    known = turn.ttft_s if turn.queued_s is None else turn.queued_s
    return turn.latency_s if known is None else known


def _thinned(occupancy: Occupancy) -> Occupancy:
    """Keeps every n-th sample, few enough for a plot."""
    step = -(-len(occupancy.time_s) // MAX_DETAIL_SAMPLES) or 1
    kept: dict[str, list[float]] = {
        name: getattr(occupancy, name)[::step] for name in occupancy.__struct_fields__
    }
    return msgspec.convert(kept, Occupancy)
