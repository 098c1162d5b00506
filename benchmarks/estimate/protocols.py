"""Ways to split training from prediction, each replayed in order of time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.estimate.folds import Fold
from benchmarks.estimate.learned import taught
from benchmarks.estimate.predictors import EstimatorQuantiles, FloatArray, Predictor, play, study
from eval.learn.calls import Call, Played

Make = Callable[[], Predictor]
Tell = Callable[[str], None]


@dataclass(slots=True)
class Forecast:
    """One method's predictions; all methods predict the same calls in the same order."""

    calls: list[Call] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    told: list[FloatArray | None] = field(default_factory=list)

    def note(self, job: Played, calls: Sequence[Call], told: Sequence[FloatArray | None]) -> None:
        self.calls.extend(calls)
        self.groups.extend([job.group] * len(calls))
        self.told.extend(told)


@dataclass(frozen=True, slots=True)
class LastOfTurn:
    """A turn with parallel calls: seconds until the last ended, and the predicted quantiles."""

    seconds: float
    told: FloatArray


# ---- held-out groups ----


def held_out(make: Make, folds: Sequence[Fold], seed: int | None = None) -> Forecast:
    """Learns the other groups, then replays each held-out job from there as if it were the only one.

    With a ``seed`` the learned jobs are still running: each began some time ago, at most as long as a job's
    calls take on average, and only what happened since is learned.
    """
    forecast = Forecast()
    for fold in folds:
        predictor = make()
        if seed is None:
            study(predictor, fold.learned)
        else:
            longest_s = sum(job.tool_s for job in fold.learned) / len(fold.learned)
            for job in fold.learned:
                watched_s = random.Random(f"watched {job.job_id} {seed}").uniform(0.0, longest_s)
                _study_begun(predictor, job, watched_s)
        for job in fold.held_out:
            forecast.note(job, job.calls, play(predictor.fork(), job))
    return forecast


def _study_begun(predictor: Predictor, job: Played, watched_s: float) -> None:
    """Learns from a job that began ``watched_s`` ago; only its calls take time.

    Ended calls are complete, a running one is censored, later ones are unknown. Calls that run at a given
    moment tend to be long: without them calls would look short. How long a job was watched does not depend on
    its calls' times, so the censoring is random, as Kaplan and Meier require.
    """
    left_s = watched_s
    for turn in job.turns:
        for call in turn.calls:
            seen_s = min(call.seconds, left_s)
            predictor.learn(replace(call, seconds=seen_s), job.job_id, censored=call.seconds > left_s)
        left_s -= turn.gap_s
        if left_s <= 0:
            return


def held_out_learned(folds: Sequence[Fold], seed: int, tell: Tell) -> Forecast:
    """Returns predictions of the estimator with a correction, both learned from the other groups."""
    forecast = Forecast()
    for number, fold in enumerate(folds, start=1):
        tell(
            f"learning a correction of {sum(len(job.calls) for job in fold.learned):,} calls, "
            f"fold {number} of {len(folds)}"
        )
        predictor = taught(fold.learned, seed)
        for job in fold.held_out:
            forecast.note(job, job.calls, play(predictor.fork(), job))
    return forecast


def parallel_held_out(folds: Sequence[Fold]) -> list[LastOfTurn]:
    """Returns the estimator's predictions for turns with several calls, learned from other groups."""
    found = []
    for fold in folds:
        estimator = EstimatorQuantiles()
        study(estimator, fold.learned)
        for job in fold.held_out:
            found += _parallel(estimator.fork(), job)
    return found


def _parallel(estimator: EstimatorQuantiles, job: Played) -> list[LastOfTurn]:
    found = []
    for turn in job.turns:
        told = estimator.predict_last(turn.calls, job.job_id) if len(turn.calls) > 1 else None
        if told is not None:
            found.append(LastOfTurn(turn.gap_s, told))
        for call in turn.calls:
            estimator.learn(call, job.job_id)
    return found


# ---- as in use ----


def in_use(make: Make, jobs: Sequence[Played]) -> Forecast:
    """Begins without data and follows all jobs: each call is predicted as it begins and learned as it ends.

    A job begins at its recorded arrival, else when the one before it ended. A call that still runs when
    another begins is not known yet. The model's own time is not recorded and left out.
    """
    forecast = Forecast()
    predictor = make()
    for happening in _happenings(jobs):
        job = happening.job
        calls = happening.calls
        if happening.begins:
            forecast.note(job, calls, [predictor.predict(call, job.job_id) for call in calls])
        else:
            predictor.learn(calls[0], job.job_id)
    return forecast


@dataclass(frozen=True, slots=True)
class _Happening:
    """The calls of a turn begin in parallel, or one call ends."""

    at_s: float
    job: Played
    calls: tuple[Call, ...]
    begins: bool


def _happenings(jobs: Sequence[Played]) -> list[_Happening]:
    """All events in the order of time; simultaneous ones by job and turn."""
    found = []
    now_s = 0.0
    for job in jobs:
        now_s = now_s if job.arrival_s is None else job.arrival_s
        for turn in job.turns:
            if turn.calls:
                found.append(_Happening(now_s, job, turn.calls, begins=True))
            found += [_Happening(now_s + call.seconds, job, (call,), begins=False) for call in turn.calls]
            now_s += turn.gap_s
    return sorted(found, key=lambda happening: happening.at_s)
