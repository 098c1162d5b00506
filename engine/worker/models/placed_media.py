"""The embeddings that a decoder reads in place of tokens of pictures and clips, in one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """Outputs of encoders for a step's tokens."""

    rows: torch.Tensor
    """[num_rows] the step's tokens that are parts of pictures or clips."""
    outputs: torch.Tensor
    """[num_rows, hidden_size * (1 + n)]: embeddings, and additions to the outputs of the first n layers
    (DeepStack, arXiv:2406.04334)."""

    def put_into(self, x: torch.Tensor) -> torch.Tensor:
        """Replace the embeddings of these tokens in place; x [num_tokens, hidden_size]"""
        return x.index_copy_(0, self.rows, self.outputs[:, : x.shape[1]].to(x.dtype))

    def replaced(self, input_ids: torch.Tensor, token_id: int) -> torch.Tensor:
        """The tokens [num_tokens], with this one in place of these."""
        return input_ids.index_fill(0, self.rows, token_id)

    def add_to(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """Add a layer's additions, if there are any, to its output x [num_tokens, hidden_size] in place."""
        size = x.shape[1]
        added = self.outputs[:, size * (layer + 1) : size * (layer + 2)]
        return x.index_add_(0, self.rows, added.to(x.dtype)) if added.shape[1] else x
