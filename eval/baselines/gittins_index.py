"""Gittins' index of jobs that are sequences of turns, estimated from the turns of all jobs so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Stage:
    """Counts over the n-th turns of all jobs."""

    num_served: int = 0
    num_last: int = 0
    """Number of them that were their job's last."""
    served_s: float = 0.0

    @property
    def num_turns(self) -> int:
        """Turns that are known; a job may end although its last turn was aborted."""
        return max(self.num_served, self.num_last)


def gittins_indices(stages: Sequence[Stage]) -> list[float]:
    """Returns the index after 0, 1, 2, ... turns, in ends per second; the last one holds for all further
    turns.

    Empty while no job has ended.

    After n of N turns it is max over k of P(N <= n + k | N > n) / E[time of turns n + 1 to min(N, n + k)]. P
    is the Kaplan-Meier estimate: the share of n-th turns that were the last; an open job counts up to its
    current turn. The time of a turn is the mean of the n-th turns. Each n is smoothed with one average turn.
    The maximum is computed from the last turn to the first (Aalto and Scully, Queueing Systems 2022): a turn
    is merged with those after it while their index is greater.
    """
    num_turns = sum(stage.num_turns for stage in stages)
    num_ends = sum(stage.num_last for stage in stages)
    all_s = sum(stage.served_s for stage in stages)
    if not num_ends or not all_s:
        return []
    mean_chance = num_ends / num_turns
    mean_s = all_s / num_turns
    indices = [mean_chance / mean_s]
    behind = [(1.0, mean_s / mean_chance)]
    """Pairs (chance to end, expected seconds) of merged turns; the nearest turns are last."""
    for stage in reversed(stages):
        weight = stage.num_turns + 1
        chance = (stage.num_last + mean_chance) / weight
        seconds = (stage.served_s + mean_s) / weight
        while behind and behind[-1][0] * seconds > chance * behind[-1][1]:
            next_chance, next_s = behind.pop()
            seconds += (1 - chance) * next_s
            chance += (1 - chance) * next_chance
        behind.append((chance, seconds))
        indices.append(chance / seconds)
    return indices[::-1]
