"""Determines which earlier tokens a token sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from engine.worker.attention.backend import IntArray

Positions = TypeVar("Positions", int, IntArray, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Reach:
    """The tokens that a token sees: those of a window, those of its chunk, or all."""

    window: int | None = None
    chunk: int | None = None

    def first_seen(self, positions: Positions) -> Positions:
        """The first token that each position sees; with a window it may be negative."""
        if self.window is not None:
            return positions - (self.window - 1)
        return positions * 0 if self.chunk is None else positions - positions % self.chunk


EVERYTHING = Reach()
