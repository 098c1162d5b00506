"""``continuum workload``: describes a workload and its assumptions, and converts any format into our own."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from eval.arguments import amount, count
from eval.errors import UsageError
from eval.report.results import require_own_files
from eval.workloads.catalog import files_of, open_workload
from eval.workloads.flags import add_max_turns
from eval.workloads.recorded import write_jobs
from eval.workloads.sampling import JobLimits
from eval.workloads.summary import render, summarize

_WORKLOADS = """\
file formats, detected by the first record:
  recorded jobs       our own, one job per line (or one JSON list), as --out writes it
  Mooncake            one request per line with its block ids; sessions are named or inferred
  aiperf              one session of several turns per line
  ShareGPT, OpenAI    chats with tool calls, one per line or one JSON list: "conversations" of
                      "from" and "value", or "messages" of "role" and "content"
  scheduler trace     of continuum serve --trace or simulate --trace
  bench records       of continuum bench --records

synthetic workloads:
  swe-bench, bfcl, openhands    token counts and tool times that match published moments;
                                swe-bench:turns=2,tokens=0.5 has twice the turns, half the tokens
  eight-turns                   a published agent: eight prompts of 92 to 13,193 tokens
  synthetic                     with texts, short enough for a small model

mixes:
  A+B+C                         equally many jobs of each, in an order drawn by the seed
"""


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that limit how much of a recording is used."""
    add = parser.add_argument
    add_max_turns(parser)
    add(
        "--max-context-tokens",
        type=count,
        metavar="N",
        help="Leave out jobs whose prompt plus output exceeds N tokens (default: none)",
    )
    add("--cut-at-context", action="store_true", help="Cut such jobs before that turn instead")
    add(
        "--gap-cap-s",
        type=amount,
        metavar="S",
        help="Cap on the time between two turns of a job, in seconds (default: none)",
    )


def limits_from(arguments: argparse.Namespace) -> JobLimits:
    """Returns the limits of those flags. UsageError if one of them would have no effect."""
    if arguments.cut_at_context and arguments.max_context_tokens is None:
        raise UsageError("--cut-at-context needs --max-context-tokens.")
    return JobLimits(
        max_turns=arguments.max_turns,
        max_context_tokens=arguments.max_context_tokens,
        cut_at_context=arguments.cut_at_context,
        gap_cap_s=arguments.gap_cap_s,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum workload``."""
    parser.epilog = _WORKLOADS
    add = parser.add_argument
    add("workload", metavar="FILE", help="File of a format below, synthetic workload, or mix A+B")
    add("--jobs", type=count, metavar="N", help="Number of jobs (default: all of a file)")
    add("--seed", type=int, metavar="K", help="Random seed of the job sample (default: the file's order)")
    add_limits(parser)
    add("--json", action="store_true", help="Print the summary as JSON")
    add(
        "--out",
        type=Path,
        metavar="FILE.jsonl",
        help="Write the jobs in our own format; compressed if it ends in .zst or .gz",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum workload``. Raises an error that names the line for what cannot be read."""
    require_own_files([("--out", arguments.out)], files_of("FILE", arguments.workload))
    opened = open_workload(arguments.workload)
    sample = opened.sample(arguments.jobs, arguments.seed, limits_from(arguments))
    if arguments.out is not None:
        write_jobs(arguments.out, sample.jobs)
    summary = summarize(opened.name, sample.jobs, sample.notes)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(summary)).decode())
    else:
        print(render(summary))
    return 0
