"""A decoder that keeps hidden states of a step's tokens, for a head that drafts from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.worker.attention.backend import AttentionBackend
from engine.worker.models.decoder import Decoder
from engine.worker.models.norms import normed


class HiddenTap:
    """A CausalModel that runs the decoder's own layers, as compiled steps do not return hidden states."""

    def __init__(self, model: Decoder, layers: Sequence[int] = ()) -> None:
        """``layers``: those whose inputs are kept; if empty, the output of the final norm is kept."""
        self.num_layers = model.num_layers
        self.num_kv_heads = model.num_kv_heads
        self.head_dim = model.head_dim
        self.num_kv_vectors = model.num_kv_vectors
        self.windows = model.windows
        self.chunks = model.chunks
        self._model = model
        self._layers = tuple(layers)
        self._hidden: torch.Tensor | None = None

    @property
    def hidden(self) -> torch.Tensor:
        """[num_tokens, hidden_size] of the last step's tokens; those of several layers are concatenated."""
        assert self._hidden is not None, "a step comes first"
        return self._hidden

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_rows: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See CausalModel.forward."""
        model = self._model
        kept = []
        x = model.embedded(input_ids)
        angles = model.angles_of(positions, x.dtype)
        for index, (layer, kind) in enumerate(zip(model.layers, model.rope_kinds, strict=True)):
            if index in self._layers:
                kept.append(x)
            x = layer(x, *angles[kind], attention)
        self._hidden = torch.cat(kept, dim=-1) if kept else normed(x, model.final_norm, model.shape)
        return model.logits_of(x[sample_rows])
