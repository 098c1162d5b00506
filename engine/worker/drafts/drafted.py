"""A drafter's result for some sequences: the likeliest next token of each, and its probability."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.worker.attention.backend import IntArray

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Drafted:
    """One token after each of some sequences."""

    token_ids: IntArray
    """[num_seqs] the likeliest token."""
    chances: FloatArray
    """[num_seqs] its probability."""
    hidden: torch.Tensor | None = None
    """[num_seqs, hidden_size] the hidden states from which a network with a shift continues."""

    def some(self, chosen: IntArray) -> Drafted:
        """The entries with these indices."""
        hidden = None if self.hidden is None else self.hidden[torch.from_numpy(chosen)]
        return Drafted(self.token_ids[chosen], self.chances[chosen], hidden)

    def behind(self, before: Drafted) -> Drafted:
        """The same tokens, with the probability that the token before each is accepted as well."""
        return Drafted(self.token_ids, before.chances * self.chances, self.hidden)


def likeliest(
    logits: torch.Tensor, hidden: torch.Tensor | None = None, offsets: torch.Tensor | None = None
) -> Drafted:
    """The likeliest token of each row, and its softmax.

    logits [num_seqs, vocab_size]; offsets [vocab_size]: the model's id of a token minus the row's index of
    it; None: they are equal
    """
    logits = logits.float()
    best = logits.max(dim=-1)
    chances = (best.values - logits.logsumexp(dim=-1)).exp()
    tokens = best.indices if offsets is None else best.indices + offsets[best.indices]
    return Drafted(tokens.numpy().astype(np.int64), chances.numpy().astype(np.float64), hidden)
