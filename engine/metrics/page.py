"""The page for Prometheus: gateways read it twenty times a second, on the loop that streams tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate, chain, islice
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

NUM_COMMENTS = 2
"""The lines before a metric's first value: its help and its type."""


class Page:
    """The metrics of a server, those of its cores side by side; only what has changed is written anew."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self._bytes = b""

    @property
    def families(self) -> Collection[Family]:
        """All metrics, in the page's order."""
        return self._families.values()

    def add(self, name: str, series: MetricWrapperBase) -> Family:
        """Adds a core's series of a metric, whose family says when values change."""
        family = self._families.setdefault(name, Family())
        family.add(series)
        return family

    def exposition(self) -> bytes:
        """The page, in prometheus_client's form."""
        if any(family.changed for family in self.families):
            self._bytes = "".join([family.text() for family in self.families]).encode()
        return self._bytes


class Family(Collector):
    """A metric: the series of each core, under one name.

    prometheus_client takes 7 us for a line, nearly all of it for names and labels. They stay as they are,
    so they are taken from its text when a series begins, and only numbers are written after that.
    """

    def __init__(self) -> None:
        self.changed = True
        """Whether a value may have changed since the last text: set by whoever records one."""
        self._by_core: list[MetricWrapperBase] = []
        self._text = ""
        self._series: list[MetricWrapperBase] | None = None
        """All series, by core and value of the label, as of the last text."""
        self._comments = ""
        self._names: list[str] = []
        """Each line with a value, without the value."""
        self._times = ""
        """The lines that tell since when series are: they do not change."""

    def add(self, series: MetricWrapperBase) -> None:
        """Adds the series of one more core."""
        self._by_core.append(series)
        self.changed = True

    def collect(self) -> Iterable[Metric]:
        """All cores' samples as one metric."""
        merged, *others = chain.from_iterable(series.collect() for series in self._by_core)
        for other in others:
            merged.samples.extend(other.samples)
        return [merged]

    def text(self) -> str:
        """The lines of this metric."""
        if self.changed:
            self.changed = False  # before values are read: what is recorded meanwhile is written next time
            self._text = self._written()
        return self._text

    def _written(self) -> str:
        series: list[MetricWrapperBase] = [
            one for core in self._by_core for one in tuple(core._metrics.values())
        ]
        values = list(chain.from_iterable(map(_values, series)))
        if series != self._series:
            self._series = series
            self._take_names(len(values))
        lines = [
            name + text + "\n" for name, text in zip(self._names, map(floatToGoString, values), strict=True)
        ]
        return "".join((self._comments, *lines, self._times))

    def _take_names(self, num_values: int) -> None:
        lines: Iterator[str] = iter(generate_latest(self).decode().splitlines(keepends=True))
        self._comments = "".join(islice(lines, NUM_COMMENTS))
        self._names = [line[: line.rindex(" ") + 1] for line in islice(lines, num_values)]
        self._times = "".join(lines)


def _values(series: Any) -> list[float]:
    """The numbers of a series, in the order of their lines. Only prometheus_client's private fields give
    them without names and labels."""
    match series:
        case Counter() | Gauge():
            return [series._value.get()]
        case Histogram():
            counts = list(accumulate(bucket.get() for bucket in series._buckets))
            return [*counts, counts[-1], series._sum.get()]
    raise TypeError(f"no metric here is a {type(series).__name__}")
