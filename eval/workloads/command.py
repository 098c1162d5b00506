"""``continuum workload``: what is in a workload, what of it is assumed, and any format into our own."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from eval.arguments import amount, count
from eval.errors import EvalError
from eval.results import require_own_files
from eval.workloads.catalog import files_of, open_workload
from eval.workloads.recorded import write_jobs
from eval.workloads.sampling import JobLimits
from eval.workloads.summary import render, summarise

_WORKLOADS = """\
formats, told apart by the first record:
  recorded jobs       our own, a job per line (or one JSON list): what --out writes
  Mooncake            a request per line with the ids of its blocks, sessions named or inferred
  aiperf              a session of several turns per line
  ShareGPT, OpenAI    chats, one JSON list or one per line, with the calls of tools: "conversations" of
                      "from" and "value", or "messages" of "role" and "content"
  scheduler trace     of continuum serve or simulate, --trace
  bench records       of continuum bench, --records

made jobs:
  swe-bench, bfcl, openhands    counts and times to published moments; swe-bench:turns=2,tokens=0.5 has
                                twice the turns and half the tokens
  synthetic                     with text, short enough for a small model

mixes:
  A+B+C                         files and made jobs: of each as many, in an order that the seed draws
"""


def add_limits(parser: argparse.ArgumentParser) -> None:
    """The flags that say how much of a recording is used."""
    add = parser.add_argument
    add("--max-turns", type=count, metavar="N", help="cut jobs to their first N turns")
    add(
        "--max-context-tokens", type=count, metavar="N", help="leave out jobs with a longer prompt and output"
    )
    add("--cut-at-context", action="store_true", help="cut such jobs before that turn instead")
    add("--gap-cap-s", type=amount, metavar="S", help="longest time between two turns of a job")


def limits_from(arguments: argparse.Namespace) -> JobLimits:
    """What those flags ask for. EvalError if one of them would be without effect."""
    if arguments.cut_at_context and arguments.max_context_tokens is None:
        raise EvalError("--cut-at-context means nothing without --max-context-tokens: where to cut.")
    return JobLimits(
        max_turns=arguments.max_turns,
        max_context_tokens=arguments.max_context_tokens,
        cut_at_context=arguments.cut_at_context,
        gap_cap_s=arguments.gap_cap_s,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``continuum workload``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _WORKLOADS
    add = parser.add_argument
    add("workload", metavar="FILE", help="a file of any format below, the name of made jobs, or a mix A+B")
    add("--jobs", type=count, metavar="N", help="so many; all of a file by default")
    add("--seed", type=int, metavar="K", help="draw or make them at random; by default the file's order")
    add_limits(parser)
    add("--json", action="store_true", help="print the figures as JSON")
    add(
        "--out",
        type=Path,
        metavar="FILE.jsonl",
        help="write recorded jobs there; packed if named .zst or .gz",
    )


def run(arguments: argparse.Namespace) -> int:
    """``continuum workload``. What cannot be read is raised, naming the line."""
    require_own_files([("--out", arguments.out)], files_of("FILE", arguments.workload))
    opened = open_workload(arguments.workload)
    sample = opened.sample(arguments.jobs, arguments.seed, limits_from(arguments))
    if arguments.out is not None:
        write_jobs(arguments.out, sample.jobs)
    summary = summarise(opened.name, sample.jobs, sample.notes)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(summary)).decode())
    else:
        print(render(summary))
    return 0
