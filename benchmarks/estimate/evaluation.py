"""Replays recorded jobs to the estimator and other methods, and scores the predictions of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from benchmarks.estimate.folds import Fold, grouped_folds
from benchmarks.estimate.learned import taught
from benchmarks.estimate.predictors import (
    EmpiricalQuantiles,
    EstimatorQuantiles,
    Predictor,
    of_all_calls,
    of_its_class,
    of_its_tool,
)
from benchmarks.estimate.protocols import (
    Forecast,
    LastOfTurn,
    Tell,
    held_out,
    held_out_learned,
    in_use,
    parallel_held_out,
)
from benchmarks.estimate.scores import (
    SHOWN_AT,
    Comparison,
    Resampling,
    Scored,
    Scores,
    ToolScores,
    by_level,
    by_program,
    pinball,
)
from benchmarks.estimate.timing import Timing, measure
from benchmarks.estimate.turns import TurnScores, score_turns
from estimator.learned.duration_trainer import MIN_CALLS
from eval.errors import WorkloadError
from eval.learn.calls import Played

ESTIMATOR = "estimator"
CLASSES_ONLY = "estimator, no history"
ENDED_ONLY = "estimator, ended only"
ALL_CALLS = "quantiles, all calls"
PER_TOOL = "quantiles, per tool"
PER_CLASS = "quantiles, per class"
LEARNED = "estimator + learned"

HELD_OUT = "held-out groups"
WATCHED = "held-out groups, learned from jobs that still ran"
AS_IN_USE = "as in use, from nothing"
MAKERS: dict[str, Callable[[], Predictor]] = {
    ESTIMATOR: EstimatorQuantiles,
    CLASSES_ONLY: lambda: EstimatorQuantiles(jobs=False),
    ENDED_ONLY: lambda: EstimatorQuantiles(censoring=False),
    ALL_CALLS: lambda: EmpiricalQuantiles(of_all_calls),
    PER_TOOL: lambda: EmpiricalQuantiles(of_its_tool),
    PER_CLASS: lambda: EmpiricalQuantiles(of_its_class),
}
IN_FULL = (ESTIMATOR, CLASSES_ONLY, ALL_CALLS, PER_TOOL, PER_CLASS)
CUT_SHORT = (ESTIMATOR, ENDED_ONLY, ALL_CALLS, PER_TOOL)


class GapScores(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of the time until the last of a turn's parallel calls ended, as the maximum of their curves."""

    num_turns: int
    pinball_s: float
    ended_by: dict[str, float]


class Protocol(msgspec.Struct, frozen=True, kw_only=True):
    """One way to split training from prediction, and the scores of every method."""

    name: str
    num_calls: int
    num_skipped: int
    """Number of calls for which some method had no data."""
    scores: list[Scores]
    comparisons: list[Comparison]
    """Comparisons of the first method with each of the others, and of a learned correction with it."""
    programs: list[ToolScores]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``continuum estimate``."""

    schema_version: int = 1
    title: str
    command: str
    """The command that reproduces it."""
    workload: str
    seed: int
    num_folds: int
    num_jobs: int
    num_groups: int
    num_calls: int
    mean_call_s: float
    notes: list[str]
    """Which figures are measured and which assumed."""
    protocols: list[Protocol]
    """The protocols, held-out groups first; one without any predictable call is left out."""
    parallel: GapScores | None
    """Scores of parallel calls; None if there were none."""
    turns: TurnScores
    timing: Timing


def evaluate(
    workload: str,
    jobs: Sequence[Played],
    notes: Sequence[str],
    *,
    num_folds: int,
    seed: int,
    learned: bool,
    command: str,
    tell: Tell,
) -> Evaluation:
    """``tell`` receives progress. WorkloadError if no call's time is known, or all jobs are of one group."""
    calls = [call for job in jobs for call in job.calls]
    if not calls:
        raise WorkloadError(f"The workload {workload} has no tool times: there is nothing to predict.")
    folds = grouped_folds(jobs, num_folds, seed)
    fewest = min(sum(len(job.calls) for job in fold.learned) for fold in folds)
    told = list(notes)
    if learned and fewest < MIN_CALLS:
        learned = False
        told.append(
            f"no correction was learned: a fold leaves {fewest} calls to learn from, fewer than {MIN_CALLS}"
        )
    protocols = _protocols(jobs, folds, seed, learned, tell)
    if not protocols or protocols[0].name != HELD_OUT:
        raise WorkloadError(
            f"Too few jobs of {workload} have tool times to learn from some and predict the others."
        )
    return Evaluation(
        title=f"predicted tool times: {workload}",
        command=command,
        workload=workload,
        seed=seed,
        num_folds=len(folds),
        num_jobs=len(jobs),
        num_groups=len({job.group for job in jobs}),
        num_calls=len(calls),
        mean_call_s=sum(call.seconds for call in calls) / len(calls),
        notes=told,
        protocols=protocols,
        parallel=_gaps(parallel_held_out(folds)),
        turns=score_turns(folds, seed),
        timing=_timing(jobs, folds[0] if learned else None, seed),
    )


def _protocols(
    jobs: Sequence[Played], folds: Sequence[Fold], seed: int, learned: bool, tell: Tell
) -> list[Protocol]:
    """Returns the protocols with at least one predictable call."""
    forecasts = {name: _told(tell, HELD_OUT, name, lambda make: held_out(make, folds)) for name in IN_FULL}
    if learned:
        forecasts[LEARNED] = held_out_learned(folds, seed, tell)
    watched = {
        name: _told(tell, WATCHED, name, lambda make: held_out(make, folds, seed)) for name in CUT_SHORT
    }
    used = {name: _told(tell, AS_IN_USE, name, lambda make: in_use(make, jobs)) for name in IN_FULL}
    tell("scores")
    found = (_protocol(HELD_OUT, forecasts, seed), _protocol(WATCHED, watched, seed))
    return [one for one in (*found, _protocol(AS_IN_USE, used, seed)) if one is not None]


def _told(
    tell: Tell, protocol: str, name: str, run: Callable[[Callable[[], Predictor]], Forecast]
) -> Forecast:
    tell(f"{protocol}: {name}")
    return run(MAKERS[name])


def _timing(jobs: Sequence[Played], fold: Fold | None, seed: int) -> Timing:
    return measure(jobs, None if fold is None else taught(fold.learned, seed))


def _protocol(name: str, forecasts: dict[str, Forecast], seed: int) -> Protocol | None:
    """Returns the scores of a protocol; None if some method never had data before a call."""
    some = next(iter(forecasts.values()))
    columns = zip(*(forecast.told for forecast in forecasts.values()), strict=True)
    kept = [place for place, told in enumerate(columns) if all(one is not None for one in told)]
    if not kept:
        return None
    calls = [some.calls[place] for place in kept]
    resampling = Resampling([some.groups[place] for place in kept], seed)
    scored = [
        Scored(who, calls, np.array([forecast.told[place] for place in kept]), resampling)
        for who, forecast in forecasts.items()
    ]
    return Protocol(
        name=name,
        num_calls=len(calls),
        num_skipped=len(some.calls) - len(calls),
        scores=[one.scores() for one in scored],
        comparisons=[
            *(scored[0].against(other) for other in scored[1:]),
            *(one.against(scored[0]) for one in scored if one.name == LEARNED),
        ],
        programs=by_program(calls, [one for one in scored if one.name in (ESTIMATOR, PER_TOOL)]),
    )


def _gaps(found: Sequence[LastOfTurn]) -> GapScores | None:
    if not found:
        return None
    actual = np.array([turn.seconds for turn in found])
    told = np.array([turn.told for turn in found])
    return GapScores(
        num_turns=len(found),
        pinball_s=float(pinball(actual, told)[:, SHOWN_AT].mean()),
        ended_by=by_level((actual[:, None] <= told).mean(axis=0)),
    )
