"""The base class of layers that keep a state of fixed size: holds where their states are."""

from __future__ import annotations

import torch
from torch import nn

from engine.worker.states.state_pool import LayerStates


class StateLayer(nn.Module):
    """A layer that replaces attention. It derives positions only from the order of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._states: LayerStates | None = None

    def use_states(self, states: LayerStates) -> None:
        """Keep the states of sequences in ``states`` from now on."""
        self._states = states

    @property
    def states(self) -> LayerStates:
        assert self._states is not None, "use_states() comes first"
        return self._states


def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x times the SiLU of a gate, both in fp32 from here on."""
    return x.float() * nn.functional.silu(gate.float())
