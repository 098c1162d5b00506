"""Finds the mask that a transformers architecture gives each layer's attention. A trial run makes the masks
to analyze them; they are never applied.

It accepts only masks that paged attention can express: every token attends to all tokens before it, or to the
last few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionMaskInterface, PreTrainedConfig

from engine.worker.models.base import cannot_be_served

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of (batch, head, query, key) that returns whether the query attends to the key;
transformers builds masks from such functions."""

_QUERIES = (0, 1, 2, 7, 63, 130, 1000, 2100)
"""Query positions at which a mask is checked."""


class TrialMasks:
    """The masks of one trial run."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self._made: list[tuple[torch.Tensor, int | None]] = []
        """The masks, each with the window that it expresses; None: all tokens before."""

    @contextmanager
    def made_for(self, attention_name: str) -> Iterator[None]:
        """Register masks for this attention in transformers, which otherwise makes none for it."""
        AttentionMaskInterface.register(attention_name, self._make)
        try:
            yield
        finally:
            # There is no public way to unregister. Unused masks would cost time in every step.
            AttentionMaskInterface._global_mapping.pop(attention_name, None)
            self._made.clear()

    def window_of(self, attention_mask: Any) -> int | None:
        """The window of a layer's mask; ModelLoadError for an unsupported mask."""
        for made, window in self._made:
            if attention_mask is made:
                return window
        what = "makes no mask that is known here" if attention_mask is None else "has a mask of its own"
        raise cannot_be_served(self._config, f"its attention {what}")

    def _make(
        self, *_: Any, q_length: int, kv_length: int, mask_function: MaskFunction, **others: Any
    ) -> torch.Tensor:
        """The function that transformers' mask interface calls to make a mask."""
        size = others.get("local_size")
        window = size if isinstance(size, int) else None
        if not _is_causal_within(mask_function, window):
            raise cannot_be_served(self._config, "its mask is not that of causal attention within a window")
        mask = torch.ones((1, 1, int(q_length), int(kv_length)), dtype=torch.bool)
        self._made.append((mask, window))
        return mask


def _is_causal_within(sees: MaskFunction, window: int | None) -> bool:
    """Whether every query attends to exactly the last ``window`` tokens up to itself, checked at positions
    where a difference would show."""
    zero = torch.zeros((), dtype=torch.int64)
    around = () if window is None else (window - 1, window, window + 1, 2 * window + 3)
    for query in {*_QUERIES, *around}:
        keys = torch.arange(query + 3)
        expected = keys <= query
        if window is not None:
            expected &= keys > query - window
        found = torch.as_tensor(sees(zero, zero, torch.tensor(query), keys)).expand(keys.shape)
        if not torch.equal(found, expected):
            return False
    return True
