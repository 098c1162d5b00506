"""What layers of a decoder leave to later ones in a step, besides hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class StepValues:
    """The values of the step under way, or of the last one."""

    keys_and_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Those of the step's tokens, both [num_tokens, num_kv_heads, head_dim], by the number of their layer
    among those with keys and values of their own."""
    layer_inputs: torch.Tensor | None = None
    """[num_tokens, num_layers, size]: see ``LayerInputs``."""
