"""``continuum trace explain``: explains one job's time."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from eval.trace.analysis.commands.opening import print_json, read_into
from eval.trace.analysis.explain import explain
from eval.trace.analysis.jobs import GapLife, PinLife, TurnLife
from eval.trace.analysis.lives import Lives
from eval.trace.analysis.pool import StepLife
from tracing.reader import TraceError

_ABOUT = """\
For each turn: waiting times and their reasons, cached and computed tokens, tool calls, the pin that
followed with the rule's inputs and answer, and how the pin ended. Times with a plus are seconds
since the job's start. The seconds of the first table add up to the job's wall time.
"""
MAX_NAMED = 5


@dataclass(slots=True)
class _OneJob:
    """Keeps one job's records, and the job of every request; a ``LifeSink``."""

    lives: Lives
    owners: dict[str, str] = field(default_factory=dict)
    """The job of each request."""

    def turn(self, turn: TurnLife) -> None:
        if turn.job_id is not None:
            self.owners[turn.req_id] = turn.job_id
        self.lives.turn(turn)

    def gap(self, gap: GapLife) -> None:
        self.lives.gap(gap)

    def pin(self, pin: PinLife) -> None:
        self.lives.pin(pin)

    def step(self, step: StepLife) -> None:
        pass

    def finished(self, job_id: str, now: float) -> None:
        self.lives.finished(job_id, now)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum trace explain``."""
    parser.epilog = _ABOUT
    parser.add_argument("trace", type=Path, metavar="FILE", help="Trace, or its first file if it was rotated")
    parser.add_argument("job", metavar="JOB", help="Job id")
    parser.add_argument("--json", action="store_true", help="Print the job's records as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum trace explain``. TraceError if there is no such trace, or no such job in it."""
    sink = _OneJob(Lives(only_job=arguments.job))
    facts = read_into(arguments.trace, sink)
    explanation = explain(facts, sink.lives, sink.owners)
    if explanation is None:
        raise TraceError(f"{arguments.trace}: {_not_there(arguments.job, sink.owners)}")
    if arguments.json:
        print_json(
            {
                "job": explanation.job,
                "wall_s": explanation.job.wall_s,
                "seconds": explanation.job.seconds,
                "spans": explanation.job.spans,
            }
        )
    else:
        print(explanation.render())
    return 0


def _not_there(job_id: str, owners: dict[str, str]) -> str:
    """Says that the job is missing; names similar jobs, or the job if the id is that of a request."""
    if job_id in owners:
        return f"{job_id} is a request of job {owners[job_id]}"
    jobs = list(dict.fromkeys(owners.values()))
    near = get_close_matches(job_id, jobs, MAX_NAMED, cutoff=0.3)
    near += [each for each in jobs if job_id in each and each not in near]
    named = near[:MAX_NAMED] or jobs[:MAX_NAMED]
    if not named:
        return f"there is no job {job_id}, the trace names none at all"
    which = "near ones are" if near else "the first ones are"
    return f"there is no job {job_id}; {which} {', '.join(named)}"
