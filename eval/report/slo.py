"""A service level objective (SLO): what 95 of 100 turns of a run may wait, and which runs keep it."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from eval.errors import UsageError
from eval.report.comparison import Load
from eval.report.metrics import RunResult
from eval.trace.analysis.distribution import Distribution


@dataclass(frozen=True, slots=True)
class Measure:
    """A wait that an SLO may bound."""

    label: str
    of: Callable[[RunResult], Distribution | None]


MEASURES = {
    "first": Measure("TTFT of first turns", lambda run: run.first_ttft_s),
    "return": Measure("TTFT of returning turns", lambda run: run.returning_ttft_s),
    "tpot": Measure("time per output token", lambda run: run.tpot_s),
}
_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Slo:
    """The bounds of p95, in seconds, by the names of ``MEASURES``."""

    bounds_s: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Reads bounds such as ``return=2,tpot=50ms``; without a unit they are in seconds. ValueError for
        others."""
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in MEASURES:
                raise ValueError(f"{name!r} is none of {', '.join(MEASURES)}")
            if name in bounds:
                raise ValueError(f"{name} is there twice")
            bounds[name] = _seconds(name, value)
        return cls(bounds)

    def with_first(self, bound_s: float) -> Slo:
        """Bounds first turns, too, unless it does: a policy may let agents wait before they begin, and such
        agents are not served."""
        return Slo({"first": bound_s, **self.bounds_s})

    def waits_s(self, runs: Sequence[RunResult]) -> dict[str, float | None]:
        """p95 of each bounded wait, the mean over runs; None if a run has no such turns."""
        return {name: _p95(name, runs) for name in self.bounds_s}

    def check_measured(self, runs: Sequence[RunResult]) -> None:
        """UsageError if runs have none of the turns that the SLO bounds."""
        for name, wait_s in self.waits_s(runs).items():
            if wait_s is None:
                reason = "no turn returns from a tool" if name == "return" else "nothing of it was measured"
                raise UsageError(f"There is no {MEASURES[name].label} to bound: {reason}.")

    def is_kept(self, runs: Sequence[RunResult]) -> bool:
        """Whether all turns of these runs, one for each seed, were answered within the bounds."""
        waits_s = self.waits_s(runs)
        bounded = [(waits_s[name], bound_s) for name, bound_s in self.bounds_s.items()]
        in_time = all(wait_s is not None and wait_s <= bound_s for wait_s, bound_s in bounded)
        return in_time and not any(run.num_errors for run in runs)

    def __str__(self) -> str:
        bounds = (f"{MEASURES[name].label} within {bound_s:g} s" for name, bound_s in self.bounds_s.items())
        return f"p95 of {', and of '.join(bounds)}"


def slo_argument(text: str) -> Slo:
    """The type of ``--slo``."""
    try:
        return Slo.parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def verdict(slo: Slo, run: RunResult, *, ended_early: bool = False) -> str:
    """One line on a run: its load, whether it kept the SLO, and its waits. There is no verdict on a run that
    ended early or lacks turns that the SLO bounds."""
    waits_s = slo.waits_s([run])
    told = [f"{name} {seconds_or_not(wait_s)}" for name, wait_s in waits_s.items()]
    if run.num_errors:
        told.append(f"{run.num_errors:,} turns failed")
    said = "kept" if slo.is_kept([run]) else "broken"
    if ended_early:
        said = "ended early, no verdict"
    elif None in waits_s.values() and not run.num_errors:
        said = "no verdict"
    return f"{Load.of(run.setting)}: {said} ({', '.join(told)})"


def seconds_or_not(wait_s: float | None) -> str:
    return "not measured" if wait_s is None else f"{wait_s:,.3f} s"


def _seconds(name: str, text: str) -> float:
    number = text.rstrip("ms")
    unit = text[len(number) :] or "s"
    try:
        value = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        raise ValueError(f"{name} must be a time such as 2 or 50ms, got {text!r}") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be above 0 and finite, got {text}")
    return value


def _p95(name: str, runs: Sequence[RunResult]) -> float | None:
    found = [MEASURES[name].of(run) for run in runs]
    known = [distribution.p95 for distribution in found if distribution is not None]
    return fmean(known) if known and len(known) == len(found) else None
