"""Which drafts of a step are taken: those that are what was sampled in their place.

Behind each draft a token is sampled as it would be without drafts: with the same parameters and history, and
with the same random number where a seed is given. A draft is taken while it equals the token sampled before
it, and the first sample that differs takes its place. As a draft is one token with probability 1, this is
rejection sampling (Leviathan et al., arXiv:2211.17192, section 2.3): draft d is accepted with probability
p(d), and what replaces a rejected one is distributed as p without d. So the output has the distribution that
it has without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.worker.attention.backend import IntArray


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step with drafts leaves of its samples, for each sequence that is sampled."""

    starts: IntArray
    """[num_sequences] its first sample."""
    counts: IntArray
    """[num_sequences] samples that are taken, from the first on: 1 and the drafts accepted."""

    @property
    def ends(self) -> IntArray:
        """[num_sequences] one behind the last sample that is taken."""
        ends: IntArray = self.starts + self.counts
        return ends

    @property
    def samples(self) -> IntArray:
        """[sum(counts)] all samples that are taken, in order."""
        before = np.cumsum(self.counts) - self.counts
        samples: IntArray = np.repeat(self.starts - before, self.counts) + np.arange(self.counts.sum())
        return samples


def verify(num_drafts: IntArray, inputs: IntArray, sampled: IntArray) -> Verified:
    """Compare drafts with what was sampled.

    All [num_samples]: ``num_drafts`` counts the drafts of the sequence up to a sample, so it begins each
    sequence with 0; ``inputs``: the token behind which it is sampled; ``sampled``: the token chosen there.
    """
    starts = np.flatnonzero(num_drafts == 0)
    is_taken = num_drafts == 0
    is_taken[1:] |= inputs[1:] == sampled[:-1]
    # Taken are those before the first that is not: where the running count of rejections is 0.
    rejections = np.cumsum(~is_taken)
    before = np.repeat(rejections[starts], np.diff(starts, append=len(num_drafts)))
    counts = np.add.reduceat((rejections == before).astype(np.int64), starts)
    return Verified(starts, counts)
