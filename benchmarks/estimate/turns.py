"""Scores predictions of what follows a turn: whether another comes, and how much its prompt grows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from benchmarks.estimate.folds import Fold
from benchmarks.estimate.predictors import FloatArray
from benchmarks.estimate.scores import Interval, Resampling, interval
from estimator.turn_outcomes import TurnOutcomes
from eval.learn.calls import TurnEnd

ENDS = ("a call", "an answer", "not recorded")
"""How a turn may have ended."""


class EndScores(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of turns that ended in the same way."""

    end: str
    num_turns: int
    mean_probability: float
    """Mean predicted probability of being the last turn."""
    share_last: float
    """Observed share of last turns."""


class TurnScores(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of turns of held-out groups; less is better. The base rate is the share of
    last turns, or the mean growth, among the turns learned from."""

    num_turns: int
    num_last: int
    brier: float
    """Mean squared error of P(last turn)."""
    brier_of_base_rate: float
    brier_ratio: Interval | None
    """The score over that of the base rate; None if the latter is 0."""
    log_loss: float
    """Mean of -ln P(observed outcome)."""
    log_loss_of_base_rate: float
    log_loss_ratio: Interval | None
    ends: list[EndScores]
    num_followed: int
    growth_rmse_tokens: float
    """Root mean squared error of the expected growth of the prompt."""
    growth_rmse_of_mean_tokens: float
    growth_mse_ratio: Interval | None
    """Ratio of the mean squared errors to those of the base rate."""
    growth_mean_tokens: float
    growth_told_mean_tokens: float
    notes: list[str]


def score_turns(folds: Sequence[Fold], seed: int) -> TurnScores:
    """Learns from the other groups; learns nothing while a held-out job runs."""
    rows: list[tuple[float, ...]] = []
    groups: list[str] = []
    ends: list[str] = []
    for fold in folds:
        learned = [turn for job in fold.learned for turn in job.turns]
        outcomes = _learned(learned)
        base = _base_rates(learned)
        for job in fold.held_out:
            rows += [_row(outcomes, turn, base) for turn in job.turns]
            groups += [job.group] * len(job.turns)
            ends += [_end(turn) for turn in job.turns]
    return _scores(np.array(rows), ends, Resampling(groups, seed), _notes(folds[0]))


def _learned(turns: Sequence[TurnEnd]) -> TurnOutcomes:
    outcomes = TurnOutcomes()
    for turn in turns:
        if turn.tools is None:
            continue  # the policy does not learn from a turn whose calls are unknown
        if turn.growth_tokens is None:
            outcomes.observe_last(turn.tools)
        else:
            outcomes.observe_next(turn.tools, turn.growth_tokens)
    return outcomes


def _base_rates(turns: Sequence[TurnEnd]) -> tuple[float, float]:
    """The share of last turns, and the mean growth of the prompt after the others."""
    growths = [max(0, turn.growth_tokens) for turn in turns if turn.growth_tokens is not None]
    return 1 - len(growths) / len(turns), sum(growths) / max(1, len(growths))


def _row(outcomes: TurnOutcomes, turn: TurnEnd, base: tuple[float, float]) -> tuple[float, ...]:
    """Returns was last, P predicted, base rate; did one follow, growth, predicted growth, mean growth."""
    was_last = turn.growth_tokens is None
    told = outcomes.last_turn_probability(turn.tools)
    growth = outcomes.prompt_growth(turn.tools) or 0.0
    return (was_last, told, base[0], not was_last, max(0, turn.growth_tokens or 0), growth, base[1])


def _end(turn: TurnEnd) -> str:
    return ENDS[2] if turn.tools is None else ENDS[0] if turn.tools else ENDS[1]


def _notes(fold: Fold) -> list[str]:
    turns = [turn for job in (*fold.learned, *fold.held_out) for turn in job.turns]
    notes = ["ASSUMED: the last turn of a job ended with an answer; its calls are not read"]
    if not any(turn.tools == () and turn.growth_tokens is not None for turn in turns):
        notes.append(
            "no turn that ended with an answer is followed by another here: P(last turn) is practically "
            "known once the answer is, so its scores mean little"
        )
    return notes


def _scores(table: FloatArray, ends: Sequence[str], resampling: Resampling, notes: list[str]) -> TurnScores:
    last, told, base, followed, growth, told_growth, mean_growth = table.T
    losses = np.stack(
        [
            (last - told) ** 2,
            (last - base) ** 2,
            _log_loss(last, told),
            _log_loss(last, base),
            followed * (growth - told_growth) ** 2,
            followed * (growth - mean_growth) ** 2,
        ],
        axis=1,
    )
    sums, resampled = resampling.sums(losses)
    num_turns = len(table)
    num_followed = max(1, int(followed.sum()))
    return TurnScores(
        num_turns=num_turns,
        num_last=int(last.sum()),
        brier=float(sums[0]) / num_turns,
        brier_of_base_rate=float(sums[1]) / num_turns,
        brier_ratio=_ratio(sums[:2], resampled[:, :2]),
        log_loss=float(sums[2]) / num_turns,
        log_loss_of_base_rate=float(sums[3]) / num_turns,
        log_loss_ratio=_ratio(sums[2:4], resampled[:, 2:4]),
        ends=_by_end(last, told, np.array(ends)),
        num_followed=int(followed.sum()),
        growth_rmse_tokens=math.sqrt(sums[4] / num_followed),
        growth_rmse_of_mean_tokens=math.sqrt(sums[5] / num_followed),
        growth_mse_ratio=_ratio(sums[4:], resampled[:, 4:]),
        growth_mean_tokens=float((followed * growth).sum() / num_followed),
        growth_told_mean_tokens=float((followed * told_growth).sum() / num_followed),
        notes=notes,
    )


def _log_loss(last: FloatArray, told: FloatArray) -> FloatArray:
    losses: FloatArray = -np.log(np.clip(np.where(last > 0, told, 1 - told), 1e-9, 1.0))
    return losses


def _by_end(last: FloatArray, told: FloatArray, ends: FloatArray) -> list[EndScores]:
    return [
        EndScores(
            end=end,
            num_turns=int((ends == end).sum()),
            mean_probability=float(told[ends == end].mean()),
            share_last=float(last[ends == end].mean()),
        )
        for end in ENDS
        if (ends == end).any()
    ]


def _ratio(sums: FloatArray, resampled: FloatArray) -> Interval | None:
    if not sums[1] or not resampled[:, 1].all():
        return None
    return interval(float(sums[0] / sums[1]), resampled[:, 0] / resampled[:, 1])
