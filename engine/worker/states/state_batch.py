"""Which states a step reads and writes."""

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
    """[num_seqs] slot of the state behind the tokens before them; 0: there are none, and it is zero."""
    targets: IntArray
    """[num_seqs] slot that the state behind these tokens goes to; it may be the source."""
    on_device: dict[torch.device, object] = field(init=False, default_factory=dict, repr=False, compare=False)
    """What a backend copied of these to a device, for the other layers of the step."""

    @property
    def starts(self) -> IntArray:
        """[num_seqs] where each sequence's tokens begin."""
        ends: IntArray = np.cumsum(self.query_lens)
        return ends - self.query_lens
