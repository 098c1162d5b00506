"""Sentences about what a trace lacks, and where they are printed."""

from __future__ import annotations

import sys
from pathlib import Path

from eval.trace.analysis.lives import TraceFacts


def faults_of(facts: TraceFacts) -> list[str]:
    """Returns what the trace lacks; empty if it has every event from the engine's start to an orderly end."""
    report = facts.report
    faults = []
    if not facts.header.from_start:
        faults.append("it begins after the engine started: of turns then under way, it has only the rest")
    if report.num_events_before:
        faults.append(f"its first {report.num_events_before:,} events are missing, as their files are gone")
    if report.cut_line is not None:
        faults.append(
            f"it was cut off in line {report.cut_line:,}, {report.cut_bytes:,} bytes are lost with it"
        )
    elif report.end is None:
        faults.append("it was not closed in order: its writer was killed, or still writes")
    num_lost = max(facts.num_lost, report.end.dropped if report.end is not None else 0)
    if num_lost:
        faults.append(f"{num_lost:,} events are missing: they came faster than they could be written")
    return faults


def warn_of_faults(path: Path, facts: TraceFacts) -> None:
    """Reports faults on stderr, as the output for an incomplete trace looks like that for a whole one."""
    for fault in faults_of(facts):
        print(f"{path} is NOT COMPLETE: {fault}", file=sys.stderr)
