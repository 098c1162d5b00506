"""A DraftNetwork made of a head and the model that it belongs to."""

from __future__ import annotations

import torch

from engine.worker.attention.backend import AttentionBackend
from engine.worker.drafts.drafted import Drafted, likeliest
from engine.worker.drafts.heads import DraftHead
from engine.worker.models.decoder import Decoder
from engine.worker.models.rotary import RotaryEmbedding


class HeadNetwork:
    """A DraftNetwork that reads the hidden state of a place and the token of the next.

    The key and value of a block's last place depend on the token after the block, which the block's hash does
    not cover. A request that reuses the block but continues with another token attends, when drafting, to one
    place made with the wrong token. Only its drafts get worse. V1 recomputes the last block.
    """

    shift = 1

    def __init__(self, head: DraftHead, model: Decoder, rope: RotaryEmbedding) -> None:
        self._head = head
        self._model = model
        self._rope = rope

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
