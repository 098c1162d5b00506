"""``continuum bench``: replays agent jobs against a running server and says what they experienced.

Speaks plain OpenAI over HTTP, so another engine can be measured in the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
from pathlib import Path
from typing import Any

import msgspec

from eval.arguments import amount, count, count_or_all, positive
from eval.bench_run import BenchOptions, BenchRun, run_bench
from eval.client import TIMEOUT_S
from eval.comparison import Comparison
from eval.dialect import DIALECTS, Identity
from eval.errors import UNREADABLE, EvalError
from eval.html_report import require_plotly, write_html
from eval.plan import Api, Limits, Replies
from eval.report import render_comparison
from eval.results import ResultFile, read_results, require_own_files, require_writable, write_results
from eval.say import say
from eval.tool_call_text import CallStyle
from eval.workloads.arrival_flags import add_arrivals
from eval.workloads.arrivals import ArrivalKind, Arrivals
from eval.workloads.catalog import files_of, open_workload

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
API_KEY_VARIABLE = "OPENAI_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``continuum bench``."""
    _add_what(parser.add_argument_group("what is replayed"))
    _add_when(parser.add_argument_group("when jobs start"))
    _add_how(parser.add_argument_group("how turns are said"))
    _add_server(parser.add_argument_group("the server"))
    _add_outputs(parser.add_argument_group("what is left behind"))


def _add_what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--workload",
        required=True,
        metavar="FILE",
        help="any file of jobs, or made ones: see continuum workload --help",
    )
    add("--jobs", type=count, metavar="N", help="so many; all of a file by default")
    add(
        "--seed",
        type=int,
        metavar="K",
        help="draw the jobs, arrivals and made prompts at random; by default the file's order",
    )
    add("--time-scale", type=amount, default=1.0, metavar="X", help="multiply the recorded tool times")
    add("--gap-cap-s", type=amount, metavar="S", help="longest tool time, after scaling")
    add("--max-turns", type=count, metavar="N", help="replay the first N turns of each job")
    add("--max-output-tokens", type=count, metavar="N", help="shorten outputs, keeping the command")
    add(
        "--max-context-tokens",
        type=count,
        metavar="N",
        help="cut jobs where prompt plus output would pass N; the server's own limit by default",
    )


def _add_when(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--rate", type=positive, metavar="JOBS_PER_S", help="open loop: jobs arrive at this mean rate")
    add_arrivals(group)
    add("--concurrency", type=count_or_all, metavar="N|all", help="closed loop: most jobs at once")
    warmup = group.add_mutually_exclusive_group()
    warmup.add_argument("--warmup-jobs", type=count, metavar="N", help="do not count the first N jobs")
    warmup.add_argument("--warmup-s", type=positive, metavar="S", help="do not count jobs of the first S s")


def _add_how(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--api",
        type=Api,
        choices=list(Api),
        help="chat where the workload has texts, else completions of made tokens, as many as recorded",
    )
    add(
        "--replies",
        type=Replies,
        choices=list(Replies),
        help="force the recorded answers (default where the server can), or take the server's own",
    )
    add(
        "--calls",
        type=CallStyle,
        choices=list(CallStyle),
        default=CallStyle.FENCED,
        help="how made answers write their tool calls",
    )
    identity = group.add_mutually_exclusive_group()
    identity.add_argument(
        "--identity",
        type=Identity,
        choices=list(Identity),
        help="what names the job in a turn, a field or a header; job_id with our server, else nothing",
    )
    identity.add_argument(
        "--no-job-id",
        dest="identity",
        action="store_const",
        const=Identity.NONE,
        help="the same as --identity none: an agent that knows nothing of us",
    )
    add(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="add these fields to each request"
    )
    add(
        "--token-ids",
        type=_id_range,
        metavar="LOW:HIGH",
        help="make prompts of these; by default of ordinary words",
    )


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="the server under test")
    add("--model", metavar="NAME", help="the served model; the server's first by default")
    add(
        "--server",
        choices=list(DIALECTS),
        help="which extensions may be sent; by default as its model card says, else standard fields only",
    )
    add("--api-key", metavar="KEY", help=f"sent as a bearer token; {API_KEY_VARIABLE} by default")
    add(
        "--timeout-s",
        type=positive,
        default=TIMEOUT_S,
        metavar="S",
        help="longest silence within one answer; far above any time a server may let a turn wait",
    )
    add("--reset-prefix-cache", action="store_true", help="let the server forget earlier runs first")
    add("--retry-busy", action="store_true", help="send a turn again that the server refused for being busy")


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--name", default="result", help="how the report calls this run")
    add("--json", type=Path, metavar="OUT", help="write the result there, for continuum compare")
    add("--html", type=Path, metavar="OUT.html", help="write a page with tables and plots there")
    add("--records", type=Path, metavar="OUT.jsonl", help="write one line per turn there, as turns end")
    add("--resume", action="store_true", help="go on from the --records of the same run, broken off earlier")
    add("--against", type=Path, metavar="RESULT.json", help="print an earlier result beside this one")


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


def _options(arguments: argparse.Namespace) -> BenchOptions:
    if arguments.resume and arguments.records is None:
        raise EvalError("--resume needs --records: the file to go on from.")
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
        arrivals=_arrivals(arguments),
        warmup_jobs=arguments.warmup_jobs or 0,
        warmup_s=arguments.warmup_s or 0.0,
        dialect=DIALECTS.get(arguments.server),
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


def _arrivals(arguments: argparse.Namespace) -> Arrivals:
    kind = ArrivalKind.AT_ONCE
    if arguments.arrivals is not None:
        kind = ArrivalKind(arguments.arrivals)
    elif arguments.rate is not None:
        kind = ArrivalKind.POISSON
    elif arguments.concurrency is not None:
        kind = ArrivalKind.CLOSED
    return Arrivals(
        kind=kind, rate_per_s=arguments.rate, cv=arguments.burstiness, concurrency=arguments.concurrency
    )


def run(arguments: argparse.Namespace) -> int:
    """``continuum bench``. Exit code 1 if a turn failed; what cannot be read or reached is raised."""
    _require_own_files(arguments)
    require_writable(arguments.json, arguments.html)
    if arguments.html:
        require_plotly()
    files, names = [], []
    if arguments.against:
        files, names = [read_results(arguments.against)], [arguments.against.stem]
    bench = asyncio.run(run_bench(_options(arguments)))
    files.append(ResultFile(title=bench.result.name, command=_command(arguments), runs=[bench.result]))
    names.append("now")
    try:
        if arguments.json:
            write_results(arguments.json, files[-1])
        if arguments.html:
            write_html(arguments.html, files, names)
    finally:  # a full disk takes nothing from who has waited
        print(render_comparison(Comparison(files, names)))
    return report_errors(bench)


def _require_own_files(arguments: argparse.Namespace) -> None:
    require_own_files(
        [("--json", arguments.json), ("--html", arguments.html), ("--records", arguments.records)],
        [*files_of("--workload", arguments.workload), ("--against", arguments.against)],
    )


def _command(arguments: argparse.Namespace) -> str:
    """What was asked for; a key is nobody else's business."""
    given = shlex.join(["continuum", *arguments.given])
    return given.replace(arguments.api_key, "KEY") if arguments.api_key else given


def report_errors(run: BenchRun) -> int:
    """Say what went wrong in a run; the exit code it deserves."""
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
