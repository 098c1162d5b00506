"""What layers that keep a state of fixed size have in common: where their states are."""

from __future__ import annotations

import torch
from torch import nn

from engine.worker.states.state_pool import LayerStates


class StateLayer(nn.Module):
    """A layer in whose place others have attention. Its positions are told by their order alone."""

    def __init__(self) -> None:
        super().__init__()
        self._states: LayerStates | None = None

    def use_states(self, states: LayerStates) -> None:
        """Keep the states of sequences there from now on."""
        self._states = states

    @property
    def states(self) -> LayerStates:
        assert self._states is not None, "use_states() comes first"
        return self._states


def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x, opened by the SiLU of a gate, both in fp32 from here on."""
    return x.float() * nn.functional.silu(gate.float())
