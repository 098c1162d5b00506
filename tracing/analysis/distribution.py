"""Means and percentiles, of values and of what lasted for a while. Knows nothing of traces."""

from __future__ import annotations

import msgspec
import polars as pl


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles interpolate between neighbours."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: pl.Series) -> Distribution | None:
        """Of the values that are there; None of none."""
        values = values.drop_nulls()
        if values.is_empty():
            return None
        p50, p95, p99 = (_number(values.quantile(share, "linear")) for share in (0.5, 0.95, 0.99))
        return cls(
            count=len(values),
            mean=_number(values.mean()),
            p50=p50,
            p95=p95,
            p99=p99,
            max=_number(values.max()),
        )


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """Of something that changed over time: for how long it was how much counts, not how often it changed."""

    mean: float
    p50: float
    p95: float
    max: float

    @classmethod
    def of(cls, frame: pl.DataFrame, value: str, weight: str) -> Level | None:
        """``weight``: the column with how long each value lasted. None if that is no time."""
        ordered = frame.select(value, weight).drop_nulls().sort(value)
        total = float(ordered[weight].sum())
        if not total > 0:
            return None
        until = ordered[weight].cum_sum()
        p50, p95 = (
            float(ordered[value][min(int((until < share * total).sum()), len(ordered) - 1)])
            for share in (0.5, 0.95)
        )
        mean = float((ordered[value] * ordered[weight]).sum()) / total
        return cls(mean=mean, p50=p50, p95=p95, max=_number(ordered[value].max()))


def _number(value: object) -> float:
    assert isinstance(value, int | float), "a column of numbers"
    return float(value)
