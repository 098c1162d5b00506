"""Recorded tool times of agent jobs, so that a live call takes equally long. Knows no agent.

The times are from the agentcgroup recordings (github.com/eunomia-bpf/agentcgroup at 5af9e7b): Claude Code at
work on repositories, alone in a container, each call timed to the millisecond. Only quantiles are kept.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from eval.agents.model import Call

SHARES = (0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)


@dataclass(frozen=True, slots=True)
class RecordedTool:
    """A kind of tool and the quantiles of its calls' seconds at ``SHARES``."""

    name: str
    num_calls: int
    quantiles_s: tuple[float, ...]

    def draw_s(self, rng: random.Random) -> float:
        """Draws a call's seconds, interpolating linearly between the quantiles."""
        return float(np.interp(rng.random(), SHARES, self.quantiles_s))


RECORDED: Mapping[str, RecordedTool] = {
    "list_files": RecordedTool(
        "ls", 34, (0.024, 0.032, 0.04, 0.058, 0.093, 0.11, 0.473, 0.664, 0.884, 1.142, 1.785, 2.357, 2.357)
    ),
    "read_file": RecordedTool(
        "Read",
        285,
        (0.015, 0.021, 0.024, 0.026, 0.03, 0.034, 0.039, 0.053, 0.154, 0.353, 0.713, 1.348, 2.075),
    ),
    "search": RecordedTool(
        "grep", 80, (0.029, 0.039, 0.06, 0.075, 0.082, 0.094, 0.1, 0.111, 0.138, 0.173, 0.229, 0.371, 1.277)
    ),
    "python": RecordedTool(
        "python -c",
        56,
        (0.564, 0.73, 0.872, 0.93, 1.063, 1.13, 1.207, 1.414, 1.555, 1.775, 1.88, 2.242, 4.444),
    ),
    "write_file": RecordedTool(
        "Write", 31, (0.015, 0.018, 0.021, 0.024, 0.026, 0.03, 0.034, 0.04, 0.056, 0.065, 0.073, 0.091, 0.091)
    ),
}
"""The recorded tool for each live tool; nothing like the other live tools was recorded."""


class RecordedDelays:
    """Draws the time of each call of one agent; the same seed gives the same times."""

    def __init__(self, seed: str, time_scale: float = 1.0) -> None:
        self._rng = random.Random(seed)
        self._time_scale = time_scale

    def __call__(self, call: Call) -> float:
        """Returns the least seconds of a call; 0 for a tool without recorded times."""
        recorded = RECORDED.get(call.name)
        return 0.0 if recorded is None else self._time_scale * recorded.draw_s(self._rng)
