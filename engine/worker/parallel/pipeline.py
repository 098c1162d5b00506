"""A stage of a pipeline: some consecutive layers of the model. Knows no transport."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.errors import ConfigError


class StageLink(Protocol):
    """Moves hidden states from one stage to the next. Both call it once per step, in the same order."""

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the previous stage sent, with the shape and dtype of x; x is overwritten."""

    def send(self, x: torch.Tensor) -> None:
        """Send x, contiguous, to the next stage. Does not wait until it arrives."""


class PipelineStage:
    """One of the stages; the first embeds tokens, the last computes logits and samples."""

    def __init__(self, index: int = 0, size: int = 1, link: StageLink | None = None) -> None:
        """``link``: needed if there are several stages."""
        self.index = index
        self.size = size
        self._link = link

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    @property
    def link(self) -> StageLink:
        assert self._link is not None, "the only stage has no others"
        return self._link

    def layers(self, num_layers: int) -> range:
        """The numbers of the stage's layers: an equal part. Layers that are left over go first to stages
        between the first, which embeds, and the last, which has the head.

        ConfigError if a stage would have none.
        """
        if num_layers < self.size:
            raise ConfigError(
                f"pipeline_parallel_size is {self.size}, but the model has {num_layers} layers."
            )
        counts = [num_layers // self.size] * self.size
        inner_first = sorted(range(self.size), key=lambda stage: (stage in (0, self.size - 1), -stage))
        for stage in inner_first[: num_layers % self.size]:
            counts[stage] += 1
        start = sum(counts[: self.index])
        return range(start, start + counts[self.index])


WHOLE_MODEL = PipelineStage()
"""The stage of a model without a pipeline."""
