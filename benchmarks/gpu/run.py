"""Runs the sections one after the other, each in a process that is stopped at its time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.gpu.floors import Rates
from benchmarks.gpu.record import CUT, FAILED, RUNNING, SKIPPED, Report, SectionRecord, read_section
from benchmarks.gpu.sections import RATES, Section
from eval.say import say

_LEAST_S = 10.0
"""A section does not start with less time left than this."""


@dataclass(slots=True)
class Run:
    """A report that grows; calls ``saved`` after every change."""

    report: Report
    device: str
    folder: Path
    """Folder of the processes' record files and of models."""
    saved: Callable[[Report], None]

    def play(self, sections: Sequence[Section]) -> None:
        began_s = time.monotonic()
        rates: Rates | None = None
        for section in sections:
            left_s = self.report.budget_s - (time.monotonic() - began_s)
            record = self._play(section, rates, left_s)
            rates = record.rates or rates
            self.report.sections.append(record)
            self.report.seconds = time.monotonic() - began_s
            self.saved(self.report)

    def _play(self, section: Section, rates: Rates | None, left_s: float) -> SectionRecord:
        if left_s < _LEAST_S:
            return _skipped(section, f"{max(left_s, 0):.0f} s of the budget were left")
        if rates is None and section is not RATES:
            return _skipped(section, "the device's rates are not known")
        limit_s = min(section.limit_s, left_s)
        say(f"{section.name}: {section.shows} (at most {limit_s:.0f} s)")
        began_s = time.monotonic()
        record = self._in_process(section, rates, limit_s)
        record.seconds = time.monotonic() - began_s
        say(f"{section.name}: {record.status} after {record.seconds:.0f} s. {record.reason}")
        return record

    def _in_process(self, section: Section, rates: Rates | None, limit_s: float) -> SectionRecord:
        out = self.folder / f"{section.name}.json"
        process = subprocess.Popen(
            self._command(section, rates, limit_s, out),
            stdout=sys.stderr,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},  # all models are made here
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _stop(process)
        record = read_section(out) or SectionRecord(name=section.name)
        if record.status == RUNNING:
            record.status, record.reason = _ending(code, limit_s)
        return record

    def _command(self, section: Section, rates: Rates | None, limit_s: float, out: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "benchmarks.gpu.measures", section.name),
            *("--device", self.device, "--out", str(out), "--models", str(self.folder)),
            *("--limit-s", str(limit_s)),
            *(() if rates is None else ("--rates", msgspec.json.encode(rates).decode())),
        ]


def _skipped(section: Section, reason: str) -> SectionRecord:
    say(f"{section.name}: skipped: {reason}")
    return SectionRecord(name=section.name, status=SKIPPED, reason=f"{reason}.")


def _ending(code: int | None, limit_s: float) -> tuple[str, str]:
    """Returns status and reason of a section that recorded none; ``code`` None: it was stopped."""
    if code is None:
        return CUT, f"It was stopped after {limit_s:.0f} s."
    return FAILED, f"Its process ended with exit code {code}."


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
