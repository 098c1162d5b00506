"""Scores predicted quantiles: losses and calibration, with intervals by resampling groups. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from benchmarks.estimate.predictors import LEVELS, FloatArray
from eval.learn.calls import Call

SHOWN = (0.1, 0.5, 0.9, 0.95)
"""The levels whose losses are averaged."""
SHOWN_AT = [LEVELS.index(level) for level in SHOWN]
NUM_RESAMPLES = 1000
LOG_FLOOR_S = 0.001
"""Seconds added before a logarithm: recorded times are whole milliseconds."""


class Interval(msgspec.Struct, frozen=True):
    """A value and its 2.5 % and 97.5 % quantiles over resampled groups."""

    value: float
    low: float
    high: float


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of one method over all calls."""

    name: str
    pinball_s: Interval
    """Mean pinball loss over calls and the levels shown."""
    pinball_by_level_s: dict[str, float]
    pinball_log: Interval
    """Mean pinball loss of ln(seconds + 1 ms), which weighs a factor equally for short and long calls."""
    crps_s: float
    """Continuous ranked probability score: twice the mean pinball loss over all levels."""
    ended_by: dict[str, float]
    """Share of calls that ended by the quantile of that level, for all levels."""
    calibration_error: Interval
    """Mean over all levels of |share of calls that ended by the quantile - level|."""
    calibration_error_by_tool: Interval
    """Calibration error within each tool, weighted by its calls."""
    calibration_error_by_program: Interval
    """Calibration error within each tool and program, weighted by its calls."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One method against another on the same calls; groups are resampled in pairs."""

    name: str
    baseline: str
    pinball_s: Interval
    """Difference of the mean pinball losses; below 0: better."""
    pinball_s_ratio: Interval | None
    """Ratio of the mean pinball losses; None if the baseline's is 0."""
    pinball_log: Interval
    pinball_log_ratio: Interval | None
    calibration_error: Interval
    calibration_error_by_tool: Interval
    calibration_error_by_program: Interval


class ToolScores(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of one tool and program."""

    program: str
    num_calls: int
    pinball_s: dict[str, float]
    """Mean pinball loss by method."""
    ended_by: dict[str, dict[str, float]]
    """Share of calls that ended by the quantile, by method and level."""


class Resampling:
    """Resamples of groups, drawn with replacement (Efron's bootstrap, 1979)."""

    def __init__(self, groups: Sequence[str], seed: int) -> None:
        """``groups``: the group of each scored item."""
        names = sorted(set(groups))
        place = {name: index for index, name in enumerate(names)}
        self._group = np.array([place[group] for group in groups])
        self._num_groups = len(names)
        draw = random.Random(f"resampled groups {seed}")
        self._weights = np.array(
            [
                np.bincount(draw.choices(range(len(names)), k=len(names)), minlength=len(names))
                for _ in range(NUM_RESAMPLES)
            ],
            dtype=np.float64,
        )

    def sums(self, values: FloatArray) -> tuple[FloatArray, FloatArray]:
        """``values``: [num_items, ...] -> their sum [...], and that of each resample [num_resamples, ...]."""
        of_groups = np.zeros((self._num_groups, *values.shape[1:]))
        np.add.at(of_groups, self._group, values)
        return of_groups.sum(axis=0), np.tensordot(self._weights, of_groups, axes=1)


def interval(value: FloatArray | float, resampled: FloatArray) -> Interval:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Interval(float(value), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Statistic:
    """A figure of all calls and of each resample."""

    value: float
    resampled: FloatArray

    def interval(self) -> Interval:
        return interval(self.value, self.resampled)

    def centred(self) -> Interval:
        """Returns the interval, shifted so that the resamples' mean is the value.

        A calibration error is a sum of absolute values, which noise increases: a resample has the noise of
        the calls and that of the resampling.
        """
        return interval(self.value, self.resampled - self.resampled.mean() + self.value)

    def minus(self, other: Statistic) -> Statistic:
        return Statistic(self.value - other.value, self.resampled - other.resampled)

    def over(self, other: Statistic) -> Interval | None:
        if not other.value or not other.resampled.all():
            return None
        return interval(self.value / other.value, self.resampled / other.resampled)


def pinball(actual: FloatArray, told: FloatArray) -> FloatArray:
    """[num_items], [num_items, num_levels] -> the same shape: the loss that the true quantile minimizes.

    R. Koenker, G. Bassett: Regression Quantiles, Econometrica 46 (1978).
    """
    above = actual[:, None] - told
    levels = np.array(LEVELS)
    return np.maximum(levels * above, (levels - 1) * above)


class Scored:
    """One method's quantiles of all calls, and the calls' times."""

    def __init__(self, name: str, calls: Sequence[Call], told: FloatArray, resampling: Resampling) -> None:
        self.name = name
        actual = np.array([call.seconds for call in calls])
        self.losses_s = pinball(actual, told)
        self.ended = actual[:, None] <= told
        self._resampling = resampling
        losses_log = pinball(np.log(actual + LOG_FLOOR_S), np.log(told + LOG_FLOOR_S))
        self.pinball_s = self._mean(self.losses_s[:, SHOWN_AT].mean(axis=1))
        self.pinball_log = self._mean(losses_log[:, SHOWN_AT].mean(axis=1))
        self.error = self._calibration_error([""] * len(calls))
        self.error_by_tool = self._calibration_error([call.tool for call in calls])
        self.error_by_program = self._calibration_error([call.program for call in calls])

    def scores(self) -> Scores:
        return Scores(
            name=self.name,
            pinball_s=self.pinball_s.interval(),
            pinball_by_level_s=by_level(self.losses_s.mean(axis=0)),
            pinball_log=self.pinball_log.interval(),
            crps_s=2 * float(self.losses_s.mean()),
            ended_by=dict(zip(map(str, LEVELS), self.ended.mean(axis=0).tolist(), strict=True)),
            calibration_error=self.error.centred(),
            calibration_error_by_tool=self.error_by_tool.centred(),
            calibration_error_by_program=self.error_by_program.centred(),
        )

    def against(self, baseline: Scored) -> Comparison:
        return Comparison(
            name=self.name,
            baseline=baseline.name,
            pinball_s=self.pinball_s.minus(baseline.pinball_s).interval(),
            pinball_s_ratio=self.pinball_s.over(baseline.pinball_s),
            pinball_log=self.pinball_log.minus(baseline.pinball_log).interval(),
            pinball_log_ratio=self.pinball_log.over(baseline.pinball_log),
            calibration_error=self.error.minus(baseline.error).centred(),
            calibration_error_by_tool=self.error_by_tool.minus(baseline.error_by_tool).centred(),
            calibration_error_by_program=self.error_by_program.minus(baseline.error_by_program).centred(),
        )

    def _mean(self, values: FloatArray) -> Statistic:
        total, totals = self._resampling.sums(np.stack([values, np.ones_like(values)], axis=1))
        return Statistic(float(total[0] / total[1]), totals[:, 0] / totals[:, 1])

    def _calibration_error(self, kinds: Sequence[str]) -> Statistic:
        """Mean over calls of the error of their kind, which is the mean over levels of |share - level|."""
        names = sorted(set(kinds))
        member = np.array([[kind == name for name in names] for kind in kinds], dtype=np.float64)
        excess = self.ended - np.array(LEVELS)
        # |sum over a kind's calls of (ended - level)| is its number of calls times |share - level|.
        sums = [self._resampling.sums(member[:, [place]] * excess) for place in range(len(names))]
        error = sum(np.abs(total).mean() for total, _ in sums)
        errors = sum((np.abs(totals).mean(axis=1) for _, totals in sums), np.zeros(NUM_RESAMPLES))
        count, counts = self._resampling.sums(np.ones(len(kinds)))
        return Statistic(float(error / count), errors / counts)


def by_level(values: FloatArray) -> dict[str, float]:
    """Maps [num_levels] to the levels shown."""
    return {str(level): float(values[place]) for level, place in zip(SHOWN, SHOWN_AT, strict=True)}


def by_program(calls: Sequence[Call], scored: Sequence[Scored]) -> list[ToolScores]:
    """Returns the scores of each program, the most frequent first."""
    places: dict[str, list[int]] = {}
    for place, call in enumerate(calls):
        places.setdefault(call.program, []).append(place)
    return [
        ToolScores(
            program=program,
            num_calls=len(at),
            pinball_s={one.name: float(one.losses_s[at][:, SHOWN_AT].mean()) for one in scored},
            ended_by={one.name: by_level(one.ended[at].mean(axis=0)) for one in scored},
        )
        for program, at in sorted(places.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    ]
