"""A job as an agent ran it: turns of text with a tool call between them. The one schema of all workloads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and what followed it: the model was given ``input_text`` more and said ``output_text``."""

    input_text: str
    """What this turn adds to the conversation: the task on the first turn, then a tool's result."""
    output_text: str
    tool: str | None = None
    """What ran after this turn; None where nothing did."""
    command: str | None = None
    """The program, for a shell tool."""
    gap_s: float | None = None
    """Seconds until the tool's result was there; None where nothing ran or nobody knows."""
    gap_measured: bool = False
    """False: ``gap_s`` is an assumption of the workload's makers, not a measurement."""


@dataclass(frozen=True, slots=True)
class Job:
    """All turns of one agent run."""

    job_id: str
    source: str
    system_text: str
    turns: tuple[Turn, ...]
    arrival_s: float | None = None
    """Seconds from the start of the trace; None where arrivals were not recorded."""


def describe_gaps(turns: Iterable[Turn]) -> str:
    """One line saying where the tool times after these turns come from."""
    gaps = list(turns)
    measured = sum(turn.gap_measured for turn in gaps)
    unknown = sum(turn.gap_s is None for turn in gaps)
    assumed = len(gaps) - measured - unknown
    parts = [
        f"{count} {name}"
        for count, name in ((measured, "measured"), (assumed, "ASSUMED"), (unknown, "unknown (taken as 0 s)"))
        if count
    ]
    return "tool times: " + (", ".join(parts) or "none")
