"""A head and the model that it belongs to, as a network that drafts."""

from __future__ import annotations

import torch

from engine.worker.attention.backend import AttentionBackend
from engine.worker.drafts.drafted import Drafted, likeliest
from engine.worker.drafts.heads import DraftHead
from engine.worker.models.decoder import Decoder
from engine.worker.models.rotary import RotaryEmbedding


class HeadNetwork:
    """A DraftNetwork that reads the hidden state of a place and the token of the next.

    The key and value of the last place of a block were made with the token behind the block, which its hash
    does not name. Who finds the block and goes on otherwise attends, when it drafts, to one place that was
    made with another token: drafts are worse by that, and nothing else is. V1 computes the last block again.
    """

    shift = 1

    def __init__(self, head: DraftHead, model: Decoder, rope: RotaryEmbedding) -> None:
        self._head, self._model, self._rope = head, model, rope

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        sample_rows: torch.Tensor,
        attention: AttentionBackend,
    ) -> Drafted:
        """See DraftNetwork."""
        assert hidden is not None, "a network with a shift reads them"
        embedded = self._model.embedded(input_ids)
        angles = self._rope.angles(positions, embedded.dtype)
        output = self._head(embedded, hidden, angles, attention)
        logits = self._logits(output.to_say[sample_rows])
        return likeliest(logits, output.hidden[sample_rows], self._head.offsets)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_samples, hidden_size] -> [num_samples, vocab_size]"""
        if self._head.lm_head is None:
            return self._model.logits_of_normed(x)
        logits: torch.Tensor = self._head.lm_head(x)
        return logits
