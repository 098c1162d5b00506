"""``continuum trace jobs``: prints a line per job."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.trace.analysis.commands.opening import count, open_tables, print_json
from eval.trace.analysis.writing import NOTHING, percent, seconds, table, tokens

if TYPE_CHECKING:
    import polars as pl

_ABOUT = """\
A job's time runs from the arrival of its first turn to the end of its last. Columns, in percent of
it: queue (waiting to be scheduled, or for a grammar), memory (waiting for KV blocks), prefill
(with loads from host memory), decode, lost (preempted, and recomputing afterwards), tools (tool
calls, and the client's own time between turns). Where turns overlap, a second counts for the most
advanced one. Recomputed: prompt tokens whose KV an earlier turn of the job had. Pins: handed over /
all. Where tokens were drafted, tok/step: output tokens per step, and accepted: of draft tokens.
"""
SORTS = {
    "arrival": ("began_s", False),
    "jct": ("wall_s", True),
    "turns": ("num_turns", True),
    "recomputed": ("recomputed_tokens", True),
    "memory": ("memory_s", True),
    "queue": ("queue_s", True),
    "prefill": ("prefill_s", True),
    "decode": ("decode_s", True),
    "preempted": ("preempted_s", True),
    "tools": ("tool_s", True),
    "pins-lost": ("pins_lost", True),
}
"""Sort keys by name: the column, and whether the largest comes first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum trace jobs``."""
    parser.epilog = _ABOUT
    add = parser.add_argument
    add("trace", type=Path, metavar="FILE", help="Trace, or its first file if it was rotated")
    add("--sort", choices=SORTS, default="arrival", help="Sort order; the largest first, except arrival")
    add("--limit", type=count, metavar="N", help="Maximum number of jobs to show (default: all)")
    add("--json", action="store_true", help="Print all columns as a list of JSON objects")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum trace jobs``. TraceError if there is no such trace."""
    column, descending = SORTS[arguments.sort]
    with open_tables(arguments.trace) as tables:
        jobs = tables.jobs.sort(column, "began_s", "job_id", descending=[descending, False, False])
    shown = jobs.head(arguments.limit) if arguments.limit else jobs
    if arguments.json:
        print_json(shown.to_dicts())
    else:
        print(_render(shown, len(jobs)))
    return 0


def _draft_cells(job: dict[str, Any]) -> list[str]:
    accepted = job["accepted_tokens"]
    num_output = job["num_output_tokens"]
    return [
        f"{num_output / (num_output - accepted):.2f}" if num_output > accepted else NOTHING,
        percent(accepted, job["drafted_tokens"]) if job["drafted_tokens"] else NOTHING,
    ]


def _render(jobs: pl.DataFrame, num_all: int) -> str:
    drafted = bool(jobs["drafted_tokens"].sum())
    head = [
        "job",
        "turns",
        "JCT s",
        "queue",
        "memory",
        "prefill",
        "decode",
        "lost",
        "tools",
        "recomputed",
        "pins",
        *(["tok/step", "accepted"] if drafted else []),
    ]
    lines = []
    for job in jobs.iter_rows(named=True):
        wall_s = job["wall_s"]
        shares = (
            job["queue_s"] + job["grammar_s"],
            job["memory_s"],
            job["prefill_s"] + job["load_s"],
            job["decode_s"],
            job["preempted_s"] + job["recompute_s"],
            job["tool_s"] + job["client_s"],
        )
        lines.append(
            [
                f"{job['job_id']}{' (open)' if job['open'] else ''}",
                str(job["num_turns"]),
                seconds(wall_s),
                *(percent(share, wall_s) for share in shares),
                tokens(job["recomputed_tokens"]),
                f"{job['pins_handed_over']}/{job['pins']}" if job["pins"] else NOTHING,
                *(_draft_cells(job) if drafted else []),
            ]
        )
    if not lines:
        return "The trace names no jobs."
    text = table(head, lines)
    if len(lines) < num_all:
        text.append(f"and {num_all - len(lines):,} more")
    return "\n".join(text)
