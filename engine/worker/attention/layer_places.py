"""Where each layer's KV is: which block table it uses, and which slot of each block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.records.kv_cache_groups import KVCacheGroup, one_group


class LayerPlace(NamedTuple):
    """Where a layer's KV is."""

    group: int
    """Index of the KV cache group whose block table the layer uses."""
    slot: int
    """The layer's part of each block, or the first of them."""
    heads: tuple[int, int] | None = None
    """Number and size of the layer's key-value heads; None: those of the pool, as in all layers."""


LayerPlaces = tuple[LayerPlace, ...]
"""A place for each layer of a model."""


def places_of(groups: Iterable[KVCacheGroup], heads: Sequence[tuple[int, int]] | None = None) -> LayerPlaces:
    """The place of each layer, given the groups of all layers, and their heads if these differ."""
    places = {
        layer: LayerPlace(index, position * group.slots_each, heads[layer] if heads else None)
        for index, group in enumerate(groups)
        for position, layer in enumerate(group.layers)
    }
    return tuple(places[layer] for layer in range(len(places)))


def one_table(num_layers: int) -> LayerPlaces:
    """The places of layers that all use one block table."""
    return places_of(one_group(num_layers))


def num_groups(places: LayerPlaces) -> int:
    """Number of KV cache groups, at least 1."""
    return 1 + max((place.group for place in places), default=0)
