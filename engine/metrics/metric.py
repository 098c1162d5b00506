"""One row of the table of metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Number = float | int
Value = Number | Sequence[Number] | None
"""What a row adds: a number, each of several numbers (histograms), or None for nothing."""


Read = str | Callable[[Any], Value | Mapping[str, Value]]


class Kind(Enum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric: its name without Prometheus' suffix, its help text, and where its values come from."""

    kind: Kind
    name: str
    text: str
    source: type | None = None
    """The record that ``read`` takes; None if an event in the API server changes it by name."""
    read: Read | None = None
    """The field of a record, or a function of it, that gives the value; by the value of ``label`` if there
    is one."""
    label: str | None = None
    """A label besides those of all metrics."""
    label_values: tuple[str, ...] = ()
    """The values that it may have, if they are few."""
    starts_at_zero: bool = False
    """Whether each of these values is exported as 0 from the start."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram; empty: of tokens, up to the model's context."""
    of_server: bool = False
    """Whether it has no label ``engine``: it belongs to no core."""


def counter(
    name: str, text: str, source: type | None = None, read: Read | None = None, **more: Any
) -> Metric:
    """A count since the start; ``read`` gives what to add."""
    return Metric(kind=Kind.COUNTER, name=name, text=text, source=source, read=read, **more)


def gauge(name: str, text: str, source: type | None = None, read: Read | None = None, **more: Any) -> Metric:
    """A value as of now; ``read`` gives it, or None to leave the last one."""
    return Metric(kind=Kind.GAUGE, name=name, text=text, source=source, read=read, **more)


def histogram(
    name: str,
    text: str,
    source: type,
    read: Read,
    buckets: tuple[float, ...] = (),
    **more: Any,
) -> Metric:
    """A distribution; ``read`` gives a value, several of them, or None."""
    return Metric(
        kind=Kind.HISTOGRAM, name=name, text=text, source=source, read=read, buckets=buckets, **more
    )
