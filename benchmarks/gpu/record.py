"""The JSON file of a run: checks, figures, and what was left out and why."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.gpu.floors import Rates
from benchmarks.gpu.goals import Goal
from eval.errors import UNREADABLE, ResultError

SCHEMA_VERSION = 1

DONE = "done"
RUNNING = "running"
SKIPPED = "skipped"
FAILED = "failed"
CUT = "cut off"
"""How a section ended, or RUNNING."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must be right."""

    name: str
    error: float | None
    """The largest error; None if it is not a number, or the check broke."""
    limit: float
    passed: bool
    note: str = ""

    @classmethod
    def of(cls, name: str, error: float, limit: float, note: str = "") -> Check:
        finite = error if math.isfinite(error) else None
        return cls(name=name, error=finite, limit=limit, passed=error <= limit, note=note)

    @classmethod
    def broken(cls, name: str, reason: str) -> Check:
        return cls(name=name, error=None, limit=0.0, passed=False, note=reason)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was timed."""

    name: str
    unit: str
    values: list[float]
    """One value for each repeat."""
    minimum: float
    median: float
    maximum: float
    floor: float | None
    """The least time, or the highest rate, that the run's own rates allow; in the same unit."""
    share_of_floor: float | None
    goal: str
    met: bool | None
    note: str

    @classmethod
    def of(
        cls,
        name: str,
        unit: str,
        values: Sequence[float],
        *,
        floor: float | None = None,
        goal: Goal | None = None,
        note: str = "",
    ) -> Figure:
        """Makes a figure. ``floor`` is the least time, or for a rate ("/s") the highest."""
        median = statistics.median(values)
        share = None
        if floor is not None:
            share = median / floor if unit.endswith("/s") else floor / median
        return cls(
            name=name,
            unit=unit,
            values=list(values),
            minimum=min(values),
            median=median,
            maximum=max(values),
            floor=floor,
            share_of_floor=share,
            goal="" if goal is None else goal.told(unit),
            met=None if goal is None else goal.met_by(median, share),
            note=note,
        )


class SectionRecord(msgspec.Struct, kw_only=True):
    """One section, possibly unfinished."""

    name: str
    status: str = RUNNING
    reason: str = ""
    """Why the section is not done."""
    seconds: float = 0.0
    checks: list[Check] = []
    figures: list[Figure] = []
    skipped: list[str] = []
    """Cases that were left out, each with its reason."""
    rates: Rates | None = None
    """Rates from the section that measures them."""

    @property
    def all_right(self) -> bool:
        """Returns whether nothing broke and no check failed so far."""
        return self.status != FAILED and all(check.passed for check in self.checks)


class Machine(msgspec.Struct, kw_only=True):
    """The machine and libraries of the run."""

    device: str
    toy_sizes: bool
    python: str
    torch: str
    triton: str
    transformers: str


class Report(msgspec.Struct, kw_only=True):
    """A run of the command."""

    schema_version: int = SCHEMA_VERSION
    note: str = ""
    command: str
    machine: Machine
    budget_s: float
    seconds: float = 0.0
    sections: list[SectionRecord] = []


def write_report(path: Path, report: Report) -> None:
    """Writes the file; raises ResultError if that fails."""
    _write(path, report)


def write_section(path: Path, section: SectionRecord) -> None:
    """Writes the file atomically: a reader finds a whole file even if the writer is killed."""
    _write(path, section)


def read_section(path: Path) -> SectionRecord | None:
    """Returns what a section wrote; None if it wrote nothing readable."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SectionRecord)
    except (OSError, *UNREADABLE):
        return None


def _write(path: Path, content: msgspec.Struct) -> None:
    half_written = path.with_name(f"{path.name}.part")
    try:
        half_written.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
        half_written.replace(path)
    except OSError as error:
        raise ResultError(f"Cannot write the result {path}: {error.strerror}.") from error
