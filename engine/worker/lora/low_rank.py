"""Adds low-rank adapters to the outputs of a decoder's linears, to each row those of its own adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

from engine.worker.attention.backend import IntArray


@dataclass(frozen=True, slots=True)
class Piece:
    """An adapter's weights for some outputs of a linear, to which it adds ``up (down x) * scale``."""

    first: int
    """The first of the outputs."""
    down: torch.Tensor
    """[rank, in_features]"""
    up: torch.Tensor
    """[num_outputs, rank]"""
    scale: float


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """A rank's part of an adapter, by the number of a linear: layer * NUM_JOINED + JoinedLinear, or
    layer * MOST_LINEARS + its number in a model of transformers."""

    pieces: Mapping[int, Sequence[Piece]]


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows of a step that use one adapter."""

    adapter: LoadedAdapter
    rows: torch.Tensor
    """[num_rows] int64: the rows that use it."""


class StepAdapters:
    """The adapters of the step that runs."""

    def __init__(self) -> None:
        self.groups: list[AdaptedRows] = []
        self.of_row: IntArray | None = None
        """[num_tokens]: an index into ``groups``, or -1; None: no row uses an adapter."""

    def begin_step(self, adapters: Sequence[LoadedAdapter | None], query_lens: IntArray) -> None:
        """Set the adapters of a step. ``adapters``: of each sequence; ``query_lens`` [num_seqs]"""
        distinct = list(dict.fromkeys(adapter for adapter in adapters if adapter is not None))
        if not distinct:
            self.groups = []
            self.of_row = None
            return
        number = {adapter: index for index, adapter in enumerate(distinct)}
        numbers = [-1 if adapter is None else number[adapter] for adapter in adapters]
        self.of_row = np.repeat(np.array(numbers, dtype=np.int64), query_lens)
        self.groups = [
            AdaptedRows(adapter, torch.from_numpy(np.flatnonzero(self.of_row == index)))
            for index, adapter in enumerate(distinct)
        ]


class LowRankLinear(nn.Module):
    """A linear with the additions of adapters."""

    def __init__(self, plain: nn.Module, number: int, step: StepAdapters) -> None:
        """``number``: see ``LoadedAdapter``."""
        super().__init__()
        self.plain = plain
        self._number = number
        self._step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features]"""
        output: torch.Tensor = self.plain(x)
        for group in self._step.groups:
            for piece in group.adapter.pieces.get(self._number, ()):
                rows = group.rows.to(x.device)
                added = linear(linear(x[rows], piece.down), piece.up) * piece.scale
                outputs = output[:, piece.first : piece.first + added.shape[1]]
                outputs.index_add_(0, rows, added)
        return output
