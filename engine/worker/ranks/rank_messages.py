"""What the engine core and the ranks of a model say to each other: pickled, over one channel for each rank.

A rank answers its start with RankReady, and each TELL_OUTPUT with the ModelRunnerOutput of its oldest
StepPlan; an EngineError in place of either is its last word. The end of the channel is LEAVE.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from engine.config import EngineConfig
from engine.core.outputs import SchedulerOutput
from engine.executor import ModelInfo


@dataclass(frozen=True, slots=True)
class RankStart:
    """All that a rank's process is told, over its standard input."""

    config: EngineConfig
    rank: int
    folder: str
    """Private folder in which the ranks find each other; whoever ends removes it."""
    channel_fileno: int
    parent_pid: int
    log_level: int


@dataclass(frozen=True, slots=True)
class RankReady:
    """A rank has loaded its part of the model."""

    info: ModelInfo
    max_concurrent_batches: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step, the same bytes for all ranks."""

    plan: SchedulerOutput
    """Without its masks, which may not be there yet."""
    has_masks: bool
    """They follow, as TokenMasks; those for the first rank hold something. The others wait for theirs, too: a
    device that waits for the first rank's tokens may hold up its host, which the masks may wait for."""


class RankOrder(Enum):
    """What a rank is asked for between plans."""

    TELL_OUTPUT = auto()
    LEAVE = auto()
