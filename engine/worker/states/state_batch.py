"""The states that a step reads and writes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.worker.attention.backend import IntArray


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The sequences of one step in the order of their tokens, and the state slots of each.

    No target is another sequence's source or target.
    """

    query_lens: IntArray
    """[num_seqs] tokens computed in this step, at least 1."""
    sources: IntArray
    """[num_seqs] slot of the state before these tokens; 0: there is none, and the state is zero."""
    targets: IntArray
    """[num_seqs] slot for the state after these tokens; it may be the source."""
    on_device: dict[torch.device, object] = field(init=False, default_factory=dict, repr=False, compare=False)
    """A backend's copies of these arrays on a device, for the other layers of the step."""

    @property
    def starts(self) -> IntArray:
        """[num_seqs] index of each sequence's first token."""
        ends: IntArray = np.cumsum(self.query_lens)
        return ends - self.query_lens
