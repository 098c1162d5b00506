"""The pool of states: a tensor for each part of each layer that has a state. Does not know which request has
which slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from engine.worker.attention.backend import IntArray
from engine.worker.states.drafted_states import DraftedStates
from engine.worker.states.operations import ChannelScan, Convolution, DeltaRule, OverTokens, Scan
from engine.worker.states.selection import select_state_ops
from engine.worker.states.state_batch import StateBatch

ALIGNMENT = 16
"""Unit of memory accesses, in bytes."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One of the tensors that a layer keeps per sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The shape of the state that a model keeps per sequence."""

    layers: tuple[tuple[StatePart, ...], ...]
    """The parts of each layer that has a state."""

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the state of one sequence, in all layers; parts begin at multiples of ``ALIGNMENT``."""
        return sum(_aligned(part.num_bytes) for parts in self.layers for part in parts)


Inputs = TypeVar("Inputs", bound=OverTokens)


class LayerStates:
    """The states of one layer, and its operations on them for the sequences of the running step."""

    def __init__(self, pool: StatePool, parts: Sequence[torch.Tensor]) -> None:
        """``parts``: [num_states, ...] each: the inputs of the convolution, and the recurrent state, if the
        layer has one."""
        self._pool = pool
        self._ops = select_state_ops(parts[0].device)
        self.conv, *self._others = parts

    @property
    def recurrent(self) -> torch.Tensor:
        """[num_states, ...]"""
        return self._others[0]

    def causal_conv(self, conv: Convolution) -> torch.Tensor:
        """-> [num_tokens, channels]"""
        return self._pool.run(lambda conv, batch: self._ops.causal_conv(conv, self.conv, batch), conv)

    def gated_delta_rule(self, rule: DeltaRule) -> torch.Tensor:
        """-> [num_tokens, v_heads, v_size]"""
        return self._pool.run(
            lambda rule, batch: self._ops.gated_delta_rule(rule, self.recurrent, batch), rule
        )

    def selective_scan(self, scan: Scan) -> torch.Tensor:
        """-> [num_tokens, heads, head_size]"""
        return self._pool.run(lambda scan, batch: self._ops.selective_scan(scan, self.recurrent, batch), scan)

    def channel_scan(self, scan: ChannelScan) -> torch.Tensor:
        """-> [num_tokens, channels] in fp32"""
        return self._pool.run(lambda scan, batch: self._ops.channel_scan(scan, self.recurrent, batch), scan)


class StatePool:
    """Slots for the states of sequences, in all layers with a state. Slot 0 is never read."""

    def __init__(self, spec: StateSpec, memory: torch.Tensor) -> None:
        """``memory``: [num_states, at least ``bytes_per_state``] in uint8, zeroed."""
        self.memory = memory
        self._batch: StateBatch | None = None
        self._drafted: DraftedStates | None = None
        views = iter(_views(spec, memory))
        self.layers = tuple(LayerStates(self, [next(views) for _ in parts]) for parts in spec.layers)
        """The states of each layer with a state."""

    @property
    def batch(self) -> StateBatch:
        """The sequences of the running step, as they are computed."""
        assert self._batch is not None, "begin_step() comes first"
        return self._batch

    def begin_step(self, batch: StateBatch, num_drafts: IntArray | None = None) -> None:
        """Set the states that the next forward pass reads and writes, for all layers.

        ``num_drafts``: [num_seqs] drafts among the tokens of each sequence, if any has some. Then ``settle``
        writes the states of the sequences with drafts.
        """
        self._drafted = None if num_drafts is None else DraftedStates(batch, num_drafts)
        self._batch = batch if self._drafted is None else self._drafted.batch

    def run(self, advance: Callable[[Inputs, StateBatch], torch.Tensor], inputs: Inputs) -> torch.Tensor:
        """Return the output of an operation for the step's tokens."""
        output = advance(inputs, self.batch)
        if self._drafted is not None:
            self._drafted.see(advance, inputs, output.device)
        return output

    def settle(self, num_accepted: Mapping[int, int]) -> None:
        """Write the states of sequences with drafts: after their known tokens and accepted drafts.

        ``num_accepted``: by the sequence's number in the step.
        """
        if self._drafted is not None:
            self._drafted.settle(num_accepted)
            self._drafted = None


def _views(spec: StateSpec, memory: torch.Tensor) -> Iterator[torch.Tensor]:
    """[num_states, *shape] of each part, one after another in the bytes of a state."""
    start = 0
    for part in (part for parts in spec.layers for part in parts):
        own = memory[:, start : start + part.num_bytes].view(part.dtype)
        yield own.view(-1, *part.shape)
        start += _aligned(part.num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
