"""Attention of models whose layers differ in the number or the size of their key-value heads, as Gemma 4's
do: each kind of layer has a backend of its own over the same pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from engine.worker.attention.backend import AttentionBackend, AttentionBatch
from engine.worker.attention.layer_places import LayerPlace, LayerPlaces

Backend = TypeVar("Backend", bound=AttentionBackend)


class MixedHeadsAttention(Generic[Backend]):
    """An AttentionBackend that leaves each layer to the backend of its kind."""

    def __init__(self, of_layers: Sequence[Backend]) -> None:
        """``of_layers``: each layer's backend; layers of one kind have the same."""
        self._of_layers = of_layers
        self._backends = list(dict.fromkeys(of_layers))

    def begin_step(self, batch: AttentionBatch) -> None:
        for backend in self._backends:
            backend.begin_step(batch)

    def begin_device_step(self, batch: Any) -> None:
        """See ``DeviceAttention``."""
        for backend in self._backends:
            backend.begin_device_step(batch)  # type: ignore[attr-defined]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **scoring: Any
    ) -> torch.Tensor:
        """See AttentionBackend."""
        return self._of_layers[layer].attend(layer, query, key, value, **scoring)

    def attend_latent(
        self, layer: int, query: torch.Tensor, latent: torch.Tensor, **scoring: Any
    ) -> torch.Tensor:
        """See AttentionBackend."""
        return self._of_layers[layer].attend_latent(layer, query, latent, **scoring)


def over_pool(
    pool: torch.Tensor, places: LayerPlaces | None, open_backend: Callable[[torch.Tensor, Any], Backend]
) -> Backend | MixedHeadsAttention[Backend]:
    """The backend that ``open_backend`` opens over a pool, or one for each kind of layer over its view of the
    pool. ``places``: None: the layers are one KV cache group."""
    if places is None or not any(place.heads for place in places):
        return open_backend(pool, places)
    opened: dict[tuple[int, int], Backend] = {}
    for heads in dict.fromkeys(place.heads for place in places):
        assert heads is not None, "all layers have theirs, or none has"
        view, slots_each = _view_of(pool, heads)
        opened[heads] = open_backend(view, _places_of(places, heads, slots_each))
    return MixedHeadsAttention([opened[place.heads] for place in places if place.heads is not None])


def _view_of(pool: torch.Tensor, heads: tuple[int, int]) -> tuple[torch.Tensor, int]:
    """The pool as layers with these heads see it, and the slots of the pool that each of them takes."""
    num_blocks, num_slots, num_vectors, block_size, *base = pool.shape
    slots_each = heads[0] * heads[1] // (base[0] * base[1])
    num_here = num_slots // slots_each
    view = pool[:, : num_here * slots_each].view(num_blocks, num_here, num_vectors, block_size, *heads)
    return view, slots_each


def _places_of(places: LayerPlaces, heads: tuple[int, int], slots_each: int) -> LayerPlaces:
    """The places of all layers in the view of these heads; those with other heads are never asked for."""
    return tuple(
        LayerPlace(place.group, place.slot // slots_each if place.heads == heads else 0) for place in places
    )
