"""Runs grouped by policy, load and seed; one policy compared with another. Knows no tables, no plots."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from eval.report.figures import Better, Figure
from eval.report.intervals import Estimate, mean_interval, ratio_interval
from eval.report.metrics import RunResult, RunSetting
from eval.report.results import ResultFile


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a run: how jobs arrive."""

    jobs_per_s: float | None
    concurrency: int | None
    arrivals: str | None

    @classmethod
    def of(cls, setting: RunSetting) -> Load:
        return cls(setting.jobs_per_s, setting.concurrency, setting.arrivals)

    def __str__(self) -> str:
        parts = [] if self.jobs_per_s is None else [f"{self.jobs_per_s:g} jobs/s"]
        parts += [] if self.arrivals is None else [f"{self.arrivals} arrivals"]
        parts += [] if self.concurrency is None else [f"up to {self.concurrency} at once"]
        return ", ".join(parts) or "all jobs at once"

    @property
    def rank(self) -> tuple[float, float, str]:
        """Sort key from light to heavy load."""
        infinite = math.inf
        return (
            infinite if self.jobs_per_s is None else self.jobs_per_s,
            infinite if self.concurrency is None else self.concurrency,
            self.arrivals or "",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One policy or server, in one file, under one setting, at all its loads."""

    label: str
    """A name that no other series has."""
    name: str
    source: int
    """Index of its file."""
    runs: tuple[RunResult, ...]

    @property
    def setting(self) -> RunSetting:
        """The setting of all its runs, except for load and seed."""
        return self.runs[0].setting

    def at(self, load: Load) -> list[RunResult]:
        return [run for run in self.runs if Load.of(run.setting) == load]

    def values(self, load: Load, figure: Figure) -> dict[tuple[int | None, int], float]:
        """The values by seed; runs that repeat a seed are distinguished by a count."""
        seen: Counter[int | None] = Counter()
        values: dict[tuple[int | None, int], float] = {}
        for run in self.at(load):
            seed = run.setting.seed
            value = figure.value(run)
            if value is not None:
                values[seed, seen[seed]] = value
            seen[seed] += 1
        return values


class Comparison:
    """All series of some result files, in the order of the files; the first one is the baseline.

    A series of a later file is compared with that of the same name in the first file, if there is one.
    """

    def __init__(self, files: Sequence[ResultFile], names: Sequence[str] = ()) -> None:
        self.files = list(files)
        self.series = _series(self.files, _file_names(self.files, names))
        loads = dict.fromkeys(Load.of(run.setting) for series in self.series for run in series.runs)
        self.loads = sorted(loads, key=lambda load: load.rank)

    @property
    def runs(self) -> list[RunResult]:
        return [run for series in self.series for run in series.runs]

    def baseline(self, series: Series) -> Series:
        same = [one for one in self.series if one.source == 0 and one.name == series.name]
        return same[0] if series.source > 0 and same else self.series[0]

    def estimate(self, series: Series, load: Load, figure: Figure) -> Estimate | None:
        """Returns the mean over seeds; None if nothing was measured."""
        values = list(series.values(load, figure).values())
        return mean_interval(values) if values else None

    def ratio(self, series: Series, load: Load, figure: Figure) -> Estimate | None:
        """Ratio to the baseline: by seed if both ran the same seeds of one workload, else of the means.

        A ratio of means has no interval. None for the baseline itself, and if the divisor is missing or 0.
        """
        baseline = self.baseline(series)
        if baseline is series:
            return None
        if series.setting.workload == baseline.setting.workload:
            before = baseline.values(load, figure)
            after = series.values(load, figure)
            paired = ratio_interval([(before[key], after[key]) for key in before if key in after])
            if paired is not None:
                return paired
        whole = self.estimate(baseline, load, figure)
        part = self.estimate(series, load, figure)
        return (
            None if whole is None or part is None or whole.value <= 0 else Estimate(part.value / whole.value)
        )

    def best(self, load: Load, figure: Figure) -> list[Series]:
        """The series with the best displayed mean; none if all are equal or neither direction is better."""
        values = {
            series.label: estimate.value
            for series in self.series
            if (estimate := self.estimate(series, load, figure)) is not None
        }
        shown = {label: figure.form(value) for label, value in values.items()}
        if figure.better is Better.NEITHER or len(set(shown.values())) < 2:
            return []
        best = figure.form((min if figure.better is Better.LESS else max)(values.values()))
        return [series for series in self.series if shown.get(series.label) == best]

    def present(self, load: Load) -> list[Series]:
        """The series that ran at a load."""
        return [series for series in self.series if series.at(load)]


def _file_names(files: list[ResultFile], names: Sequence[str]) -> list[str]:
    """Distinct names of the files: as given, else by title, else by number."""
    chosen = list(names) or [file.title or f"file {number}" for number, file in enumerate(files, 1)]
    if len(set(chosen)) < len(chosen):
        return [f"{name}, file {number}" for number, name in enumerate(chosen, 1)]
    return chosen


def _series(files: list[ResultFile], file_names: list[str]) -> list[Series]:
    groups: defaultdict[tuple[int, RunSetting], list[RunResult]] = defaultdict(list)
    for source, file in enumerate(files):
        for run in file.runs:
            groups[source, _without_load(run.setting)].append(run)
    told = [_descriptions(setting, file_names[source]) for source, setting in groups]
    labels = _distinct(told)
    return [
        Series(label, setting.name, source, tuple(runs))
        for label, ((source, setting), runs) in zip(labels, groups.items(), strict=True)
    ]


def _without_load(setting: RunSetting) -> RunSetting:
    return RunSetting(
        name=setting.name,
        model=setting.model,
        simulated=setting.simulated,
        workload=setting.workload,
        num_replicas=setting.num_replicas,
        hardware=setting.hardware,
    )


def _descriptions(setting: RunSetting, file_name: str) -> list[str]:
    """What distinguishes a series from others of its name, the most distinctive first."""
    return [
        setting.name,
        setting.model,
        setting.hardware or "hardware not named",
        f"{setting.num_replicas} replicas",
        setting.workload,
        "simulated" if setting.simulated else "measured",
        file_name,
    ]


def _distinct(told: list[list[str]]) -> list[str]:
    """The names, with as much in parentheses as makes equal ones distinct."""
    chosen: list[list[str]] = [[words[0]] for words in told]
    for column in range(1, len(told[0]) if told else 0):
        for alike in _alike(chosen):
            if len({told[index][column] for index in alike}) > 1:
                for index in alike:
                    chosen[index].append(told[index][column])
    return [name if not more else f"{name} ({', '.join(more)})" for name, *more in chosen]


def _alike(chosen: list[list[str]]) -> list[list[int]]:
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, words in enumerate(chosen):
        groups[tuple(words)].append(index)
    return [group for group in groups.values() if len(group) > 1]
