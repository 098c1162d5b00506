"""Decides which drafts of a step are accepted: those that equal the token sampled in their place.

After each draft the step samples a token as it would without drafts: with the same parameters and history,
and with the same random number if a seed is given. A draft is accepted if it equals the token sampled before
it, and all drafts before it are accepted; the first sample that differs replaces its draft. As a draft is one
token with probability 1, this is rejection sampling (Leviathan et al., arXiv:2211.17192, section 2.3): draft
d is accepted with probability p(d), and the token that replaces a rejected one follows p without d. So the
output has the same distribution as without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.worker.attention.backend import IntArray


@dataclass(frozen=True, slots=True)
class Verified:
    """The samples of a step with drafts that are kept, for each sampled sequence."""

    starts: IntArray
    """[num_sequences] index of its first sample."""
    counts: IntArray
    """[num_sequences] samples that are kept, from the first on: 1 plus the accepted drafts."""

    @property
    def ends(self) -> IntArray:
        """[num_sequences] index after the last sample that is kept."""
        ends: IntArray = self.starts + self.counts
        return ends

    @property
    def samples(self) -> IntArray:
        """[sum(counts)] indices of all samples that are kept, in order."""
        before = np.cumsum(self.counts) - self.counts
        samples: IntArray = np.repeat(self.starts - before, self.counts) + np.arange(self.counts.sum())
        return samples


def verify(num_drafts: IntArray, inputs: IntArray, sampled: IntArray) -> Verified:
    """Compare drafts with the sampled tokens.

    All [num_samples]: ``num_drafts`` counts the drafts of the sequence up to a sample, 0 at the first sample
    of each sequence; ``inputs``: the token before the sample; ``sampled``: the sampled token.
    """
    starts = np.flatnonzero(num_drafts == 0)
    is_taken = num_drafts == 0
    is_taken[1:] |= inputs[1:] == sampled[:-1]
    # Kept are the samples before the first that differs: where the running count of rejections is 0.
    rejections = np.cumsum(~is_taken)
    before = np.repeat(rejections[starts], np.diff(starts, append=len(num_drafts)))
    counts = np.add.reduceat((rejections == before).astype(np.int64), starts)
    return Verified(starts, counts)
