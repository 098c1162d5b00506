"""What a section works with: the device, the sizes, the rates and the record of its results."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.floors import Floors, Rates
from benchmarks.gpu.goals import Goal
from benchmarks.gpu.measures.device import Device, seconds_of
from benchmarks.gpu.record import Check, Figure, SectionRecord, write_section
from benchmarks.gpu.shapes import TimedModel
from benchmarks.gpu.sizes import Sizes
from eval.say import say

_SHOWN_LINES = 3
"""Lines of an error that the record keeps; the whole error goes to standard error."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One running section. Writes each result to disk as soon as it is known."""

    device: Device
    sizes: Sizes
    rates: Rates
    record: SectionRecord
    out: Path
    models: Path
    """Folder of the model folders."""
    ends_at_s: float
    """When the section is stopped, by ``time.monotonic()``."""

    def check(self, name: str, error: float, limit: float, note: str = "") -> None:
        """Adds a check; an ``error`` of NaN never passes."""
        self._add_check(Check.of(name, error, limit, note))

    def figure(
        self,
        name: str,
        unit: str,
        values: Sequence[float],
        *,
        floor: float | None = None,
        goal: Goal | None = None,
        note: str = "",
    ) -> None:
        """Adds a figure; see Figure.of."""
        figure = Figure.of(name, unit, values, floor=floor, goal=goal, note=note)
        say(f"  {name}: {figure.median:.4g} {unit}")
        self.record.figures.append(figure)
        self.save()

    def skip(self, case: str, reason: str) -> None:
        say(f"  {case}: left out: {reason}")
        self.record.skipped.append(f"{case}: {reason}")
        self.save()

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Runs one of several cases: if it breaks, that is recorded as its result, and the others go on."""
        try:
            yield
        except Exception as error:  # of a kernel, library or device: the next case may still run
            traceback.print_exc()
            self._add_check(Check.broken(name, first_lines(error)))

    def time_left_s(self) -> float:
        return self.ends_at_s - time.monotonic()

    def repeats(self, action: Callable[[], object], num_repeats: int | None = None) -> list[float]:
        """Returns the seconds of each repeat, after one warm-up run."""
        action()
        return [seconds_of(self.device, action) for _ in range(num_repeats or self.sizes.num_repeats)]

    def repeats_of_kernels(self, action: Callable[[], object], num_calls: int) -> list[float]:
        """Returns seconds per call for each repeat of ``num_calls`` recorded calls, like a step's graph."""
        action()
        self.device.synchronize()
        calls = self.device.recorded(lambda: [action() for _ in range(num_calls)])
        return [each / num_calls for each in self.repeats(calls)]

    def floors(self, shape: TimedModel) -> Floors:
        return Floors(shape, self.rates)

    def save(self) -> None:
        write_section(self.out, self.record)

    def _add_check(self, check: Check) -> None:
        if not check.passed:
            say(f"  WRONG: {check.name}: {check.error} (limit {check.limit}) {check.note}")
        self.record.checks.append(check)
        self.save()


def first_lines(error: BaseException) -> str:
    """Returns an error's type and the first lines of its message."""
    lines = str(error).strip().splitlines()[:_SHOWN_LINES]
    return f"{type(error).__name__}: {' '.join(lines)}"
