"""The interface of a model, and helpers to read every family's config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from engine.errors import ModelLoadError
from engine.worker.attention.backend import AttentionBackend

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class CausalModel(Protocol):
    """A loaded decoder-only model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_kv_vectors: int
    """Vectors per token in each key-value head: 2, a key and a value; or 1, a latent, which is both."""

    @property
    def windows(self) -> Sequence[int | None]:
        """The attention window of each layer, None where there is none."""

    @property
    def chunks(self) -> Sequence[int | None]:
        """The attention chunk of each layer, None where there is none."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_rows: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Run one step over all its tokens and return the logits of the rows to sample.

        input_ids, positions [num_tokens], for a model that reads pictures also positions [3, num_tokens];
        sample_rows [num_samples], ascending -> [num_samples, vocab_size], which the next step may overwrite;
        for a model that pools [num_samples, hidden_size], the inputs of its head
        """


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """The attention window of each layer, None for full attention."""
    num_layers: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    layer_types: list[str] | None = getattr(config, "layer_types", None)
    if layer_types is None:
        return [window] * num_layers
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise cannot_be_served(config, f"it has {kind} layers")
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def architecture_of(config: PreTrainedConfig) -> str:
    """The architecture's name for messages to users."""
    named: list[str] | None = config.architectures
    return named[0] if named else str(config.model_type)


def cannot_be_served(config: PreTrainedConfig, reason: str) -> ModelLoadError:
    """The error for an architecture that this engine refuses."""
    return ModelLoadError(f"Architecture {architecture_of(config)!r} cannot be served: {reason}.")
