"""What a drafter says of the last tokens of some sequences: the likeliest next one, and how likely it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.worker.attention.backend import IntArray

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Drafted:
    """One token behind each of some sequences."""

    token_ids: IntArray
    """[num_seqs] the likeliest token."""
    chances: FloatArray
    """[num_seqs] its probability."""
    hidden: torch.Tensor | None = None
    """[num_seqs, hidden_size] the hidden states from which a network with a shift continues."""

    def some(self, chosen: IntArray) -> Drafted:
        """Those with these indices."""
        hidden = None if self.hidden is None else self.hidden[torch.from_numpy(chosen)]
        return Drafted(self.token_ids[chosen], self.chances[chosen], hidden)

    def behind(self, before: Drafted) -> Drafted:
        """The same, each with the chance that the token before it is accepted as well."""
        return Drafted(self.token_ids, before.chances * self.chances, self.hidden)


def likeliest(
    logits: torch.Tensor, hidden: torch.Tensor | None = None, offsets: torch.Tensor | None = None
) -> Drafted:
    """The token that each row favours, and its softmax.

    logits [num_seqs, vocab_size]; offsets [vocab_size]: what a row's number of a token is less than the
    model's, None: nothing
    """
    logits = logits.float()
    best = logits.max(dim=-1)
    chances = (best.values - logits.logsumexp(dim=-1)).exp()
    tokens = best.indices if offsets is None else best.indices + offsets[best.indices]
    return Drafted(tokens.numpy().astype(np.int64), chances.numpy().astype(np.float64), hidden)
