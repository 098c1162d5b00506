"""``continuum bench``: replays agent jobs against a running server and reports latencies and cache use.

Uses the plain OpenAI API over HTTP, so another engine can be measured in the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from eval.arguments import amount, count, numbers, positive
from eval.errors import UNREADABLE, UsageError
from eval.load.bench_run import BenchOptions, BenchRun, run_bench
from eval.load.client import TIMEOUT_S
from eval.load.planner import Api, Limits, Replies
from eval.load.server_type import SERVER_TYPES, Identity
from eval.load.tool_call_text import CallStyle
from eval.report.comparison import Comparison
from eval.report.html_report import require_plotly, write_html
from eval.report.metrics import TTFT_LIMIT_S
from eval.report.results import (
    ResultFile,
    read_results,
    require_own_files,
    require_writable,
    write_results,
)
from eval.report.slo import Slo, slo_argument, verdict
from eval.report.tables import render_comparison
from eval.say import say
from eval.workloads.arrivals import ArrivalKind, Arrivals
from eval.workloads.catalog import files_of, open_workload
from eval.workloads.flags import add_arrivals, add_jobs

INTERRUPTED = 130
"""Exit code after Ctrl-C, by the convention of shells."""
API_KEY_VARIABLE = "OPENAI_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum bench``."""
    parser.usage = "continuum bench --workload FILE [--flag VALUE ...]"
    _add_what(parser.add_argument_group("workload"))
    _add_when(parser.add_argument_group("arrivals"))
    _add_how(parser.add_argument_group("requests"))
    _add_server(parser.add_argument_group("server"))
    _add_outputs(parser.add_argument_group("results"))


def _add_what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add_jobs(group)
    add(
        "--seed",
        type=int,
        metavar="K",
        help="Random seed of the job sample, arrivals and synthetic prompts (default: the file's order)",
    )
    add("--time-scale", type=amount, default=1.0, metavar="X", help="Factor on the recorded tool times")
    add(
        "--gap-cap-s",
        type=amount,
        metavar="S",
        help="Cap on a tool time after scaling, in seconds (default: none)",
    )
    add(
        "--max-output-tokens",
        type=count,
        metavar="N",
        help="Shorten outputs to N tokens, keeping the tool call (default: as recorded)",
    )
    add(
        "--max-context-tokens",
        type=count,
        metavar="N",
        help="Cut a job at the turn whose prompt plus output exceeds N tokens (default: the server's limit)",
    )


def _add_when(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--rate",
        type=numbers,
        metavar="R[,R...]",
        help="Open loop: mean arrival rate in jobs per second; several rates are run one after another, "
        "and need --reset-prefix-cache",
    )
    add_arrivals(group)
    add(
        "--concurrency",
        type=_concurrencies,
        metavar="N[,N...]|all",
        help="Closed loop: number of concurrent jobs; several numbers are run one after another, and need "
        "--reset-prefix-cache",
    )
    warmup = group.add_mutually_exclusive_group()
    warmup.add_argument(
        "--warmup-jobs", type=count, metavar="N", help="Exclude the first N jobs from the results"
    )
    warmup.add_argument(
        "--warmup-s", type=positive, metavar="S", help="Exclude jobs that arrive in the first S seconds"
    )


def _add_how(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--api",
        type=Api,
        choices=list(Api),
        help="API to call (default: chat if the workload has texts, else completions of synthetic prompts)",
    )
    add(
        "--replies",
        type=Replies,
        choices=list(Replies),
        help="forced: the recorded responses; live: let the model answer (default: forced if possible)",
    )
    add(
        "--calls",
        type=CallStyle,
        choices=list(CallStyle),
        default=CallStyle.FENCED,
        help="Tool-call format of synthetic responses",
    )
    identity = group.add_mutually_exclusive_group()
    identity.add_argument(
        "--identity",
        type=Identity,
        choices=list(Identity),
        help="How requests name their job (default: job_id with a continuum server, else none)",
    )
    identity.add_argument(
        "--no-job-id",
        dest="identity",
        action="store_const",
        const=Identity.NONE,
        help="Same as --identity none",
    )
    add(
        "--extra-body",
        type=_json_object,
        default={},
        metavar="JSON",
        help="JSON object merged into every request",
    )
    add(
        "--token-ids",
        type=_id_range,
        metavar="LOW:HIGH",
        help="Token id range of synthetic prompts (default: ordinary words)",
    )


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="URL of the server under test")
    add("--model", metavar="NAME", help="Model name (default: the first that the server lists)")
    add(
        "--server",
        choices=list(SERVER_TYPES),
        help="Server type, which decides the extensions sent (default: detected; else standard fields only)",
    )
    add("--api-key", metavar="KEY", help=f"API key, sent as bearer token (default: ${API_KEY_VARIABLE})")
    add(
        "--timeout-s",
        type=positive,
        default=TIMEOUT_S,
        metavar="S",
        help="Timeout between two chunks of a response, in seconds",
    )
    add("--reset-prefix-cache", action="store_true", help="Reset the server's prefix cache before each run")
    add("--retry-busy", action="store_true", help="Retry turns that the server refuses with 429 or 503")


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--name", default="result", help="Name of the run in reports")
    add(
        "--slo",
        type=slo_argument,
        metavar="NAME=TIME[,...]",
        help="Report which runs keep p95 of these times within their bounds: first (TTFT of first turns, "
        f"{TTFT_LIMIT_S:g} s unless given), return (TTFT of returning turns), tpot (time per output token), "
        "such as return=2,tpot=50ms",
    )
    add("--json", type=Path, metavar="OUT", help="Write the result to this file, for continuum compare")
    add("--html", type=Path, metavar="OUT.html", help="Write an HTML report with tables and plots")
    add("--records", type=Path, metavar="OUT.jsonl", help="Write a JSON line per finished turn")
    add("--resume", action="store_true", help="Resume the interrupted run of --records")
    add("--against", type=Path, metavar="RESULT.json", help="Compare with this earlier result")


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except UNREADABLE as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}") from error


def _id_range(text: str) -> range:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) + 2 <= int(high)):
        raise argparse.ArgumentTypeError(f"must be LOW:HIGH with at least two ids, got {text!r}")
    return range(int(low), int(high))


def _concurrencies(text: str) -> list[int | None]:
    """Counts separated by commas, or ``all``, which is None."""
    if text == "all":
        return [None]
    try:
        counts = [count(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers or all, got {text!r}") from None
    if len(set(counts)) < len(counts):
        raise argparse.ArgumentTypeError(f"has a number twice: {text}")
    return [*counts]


def _options(arguments: argparse.Namespace, arrivals: Arrivals) -> BenchOptions:
    if arguments.resume and arguments.records is None:
        raise UsageError("--resume needs --records, the file to resume from.")
    return BenchOptions(
        base_url=arguments.base_url,
        workload=open_workload(arguments.workload),
        num_jobs=arguments.jobs,
        draw_seed=arguments.seed,
        name=arguments.name,
        limits=Limits(
            max_turns=arguments.max_turns,
            max_output_tokens=arguments.max_output_tokens,
            max_context_tokens=arguments.max_context_tokens,
            time_scale=arguments.time_scale,
            gap_cap_s=arguments.gap_cap_s,
        ),
        api=arguments.api,
        replies=arguments.replies,
        calls=arguments.calls,
        seed=arguments.seed or 0,
        token_ids=arguments.token_ids,
        arrivals=arrivals,
        warmup_jobs=arguments.warmup_jobs or 0,
        warmup_s=arguments.warmup_s or 0.0,
        server_type=SERVER_TYPES.get(arguments.server),
        identity=arguments.identity,
        model=arguments.model,
        timeout_s=arguments.timeout_s,
        api_key=arguments.api_key or os.environ.get(API_KEY_VARIABLE),
        extra_body=arguments.extra_body,
        retry_busy=arguments.retry_busy,
        reset_prefix_cache=arguments.reset_prefix_cache,
        records=arguments.records,
        resume=arguments.resume,
    )


def _arrivals(arguments: argparse.Namespace) -> list[Arrivals]:
    """The loads that are run one after another."""
    kind = ArrivalKind.AT_ONCE
    if arguments.arrivals is not None:
        kind = ArrivalKind(arguments.arrivals)
    elif arguments.rate is not None:
        kind = ArrivalKind.POISSON
    elif arguments.concurrency is not None:
        kind = ArrivalKind.CLOSED
    loads = [
        Arrivals(kind=kind, rate_per_s=rate, cv=arguments.burstiness, concurrency=concurrency)
        for rate in arguments.rate or [None]
        for concurrency in arguments.concurrency or [None]
    ]
    if len(loads) > 1 and not arguments.reset_prefix_cache:
        raise UsageError(
            "Several loads need --reset-prefix-cache: all send the same prompts, and a later one would find "
            "them cached."
        )
    if len(loads) > 1 and arguments.records is not None:
        raise UsageError(f"--records has the turns of a single run, but {len(loads)} were requested.")
    return loads


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum bench``. Exit code 1 if a turn failed; raises for unreadable or unreachable inputs."""
    _require_own_files(arguments)
    require_writable(arguments.json, arguments.html)
    if arguments.html:
        require_plotly()
    files = []
    names = []
    if arguments.against:
        files = [read_results(arguments.against)]
        names = [arguments.against.stem]
    loads = _arrivals(arguments)
    runs = _run_all(_options(arguments, loads[0]), loads)
    results = [run.result for run in runs]
    files.append(ResultFile(title=arguments.name, command=_command(arguments), runs=results))
    names.append("now")
    try:
        if arguments.json:
            write_results(arguments.json, files[-1])
        if arguments.html:
            write_html(arguments.html, files, names)
    finally:  # print the report even if the disk is full
        print(render_comparison(Comparison(files, names)))
    if arguments.slo is not None:
        _report_slo(arguments.slo.with_first(TTFT_LIMIT_S), runs, len(loads))
    return max(report_errors(run) for run in runs)


def _run_all(options: BenchOptions, loads: Sequence[Arrivals]) -> list[BenchRun]:
    """Runs one load after another, until one is interrupted or the server is gone."""
    runs = []
    for arrivals in loads:
        runs.append(asyncio.run(run_bench(replace(options, arrivals=arrivals))))
        if runs[-1].interrupted or runs[-1].gone is not None:
            break
    return runs


def _report_slo(slo: Slo, runs: Sequence[BenchRun], num_loads: int) -> None:
    print(f"SLO: {slo}")
    for run in runs:
        print(f"  {verdict(slo, run.result, ended_early=run.interrupted or run.gone is not None)}")
    if len(runs) < num_loads:
        print(f"  {num_loads - len(runs)} of {num_loads} loads were not run")


def _require_own_files(arguments: argparse.Namespace) -> None:
    require_own_files(
        [("--json", arguments.json), ("--html", arguments.html), ("--records", arguments.records)],
        [*files_of("--workload", arguments.workload), ("--against", arguments.against)],
    )


def _command(arguments: argparse.Namespace) -> str:
    """Returns the command line without the API key."""
    given = shlex.join(["continuum", *arguments.given])
    return given.replace(arguments.api_key, "KEY") if arguments.api_key else given


def report_errors(run: BenchRun) -> int:
    """Prints the errors of a run; returns its exit code."""
    failed = [turn for turn in run.turns if turn.error is not None]
    if run.records_broken is not None:
        say(f"error: {run.result.name}: {run.records_broken}")
    if run.gone is not None:
        say(f"error: {run.result.name}: {run.gone}")
    else:
        for turn in failed[:5]:
            say(f"error: {run.result.name}, job {turn.job_id}, turn {turn.turn}: {turn.error}")
    if run.interrupted:
        return INTERRUPTED
    if run.gone is None and not failed and run.result.num_jobs == 0:
        say(f"error: {run.result.name}: no job was counted, all began during the warm-up")
        return 1
    return 1 if failed or run.gone is not None or run.records_broken is not None else 0
