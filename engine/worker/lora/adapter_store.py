"""The adapters of a worker: loads them from their folders, and assigns them to the rows of each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.config.lora import LoRAConfig
from engine.errors import ConfigError, RequestError
from engine.records.adapters import Adapter
from engine.worker.attention.backend import IntArray
from engine.worker.lora.adapter_folder import LowRankWeights, read_adapter
from engine.worker.lora.low_rank import LoadedAdapter, LowRankLinear, Piece, StepAdapters
from engine.worker.lora.places import NUM_JOINED, JoinedLinear, Place, places_of
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from engine.worker.models.layer import DecoderLayer
from engine.worker.models.mixers.attention_beside_state import AttentionBesideState
from engine.worker.parallel.group import TensorParallelGroup
from engine.worker.parallel.linears import RowParallelLinear

logger = logging.getLogger(__name__)

STEPS_TO_STAY = 64
"""Steps for which a dropped adapter is kept: more than can be under way."""

MOST_LINEARS = 1024
"""More linears than a layer of transformers' models has, but for experts."""
_JOINED_NAMES = {
    JoinedLinear.QKV: ("attention", "qkv"),
    JoinedLinear.OUTPUT: ("attention", "output"),
    JoinedLinear.GATE_UP: ("mlp", "gate_up"),
    JoinedLinear.DOWN: ("mlp", "down"),
}


class AdapterStore:
    """Adapters by their keys. They may be loaded while a step runs."""

    def __init__(self, model: CausalModel, config: LoRAConfig, group: TensorParallelGroup) -> None:
        """Wrap each linear that adapters may change in a LowRankLinear."""
        self.step = StepAdapters()
        self._max_rank = config.max_lora_rank
        is_native = isinstance(model, Decoder)
        like: Any = model.final_norm if isinstance(model, Decoder) else model
        self._dtype = like.dtype
        self._device = like.device
        self._layers = model.layer_numbers if isinstance(model, Decoder) else range(model.num_layers)
        self._num_all_layers = model.num_all_layers if isinstance(model, Decoder) else model.num_layers
        self._numbers_each = NUM_JOINED if is_native else MOST_LINEARS
        self._places: dict[int, dict[str, Place]] = {}
        self._loaded: dict[str, LoadedAdapter] = {}
        self._leaving: dict[str, tuple[LoadedAdapter, int]] = {}
        """Dropped adapters, each with the number of steps that were begun before."""
        self._num_steps = 0
        self._group = group
        self.attach(model)

    def attach(self, model: CausalModel) -> None:
        """Apply adapters to this model from now on; it must have the sizes of the previous model."""
        if not isinstance(model, Decoder):
            self._attach_named(model)
            return
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, DecoderLayer)
            places = places_of(layer, model.shape, self._group.rank, self._group.size)
            self._places[index] = places
            for joined in {place.linear for place in places.values()}:
                _wrap(layer, JoinedLinear(joined), index, self.step)

    def _attach_named(self, model: Any) -> None:
        """The same for a model of transformers, whose linears are as a checkpoint names them."""
        for index, linears in enumerate(model.linears_of_layers()):
            places = {}
            for number, (name, each) in enumerate(linears.items()):
                part = (self._group.rank, self._group.size) if each.split else (0, 1)
                by_inputs = each.split == "rowwise"
                sizes = each.out_features, each.in_features
                places[name] = Place(number, 0, *sizes, *part, by_inputs=by_inputs)
                each.rows = LowRankLinear(each.rows, index * MOST_LINEARS + number, self.step)
            assert len(places) <= MOST_LINEARS
            self._places[index] = places

    def calls(self) -> dict[str, Callable[..., Any]]:
        """What the core may call, by name."""
        return {"load_adapter": self.load, "drop_adapter": self.drop}

    def load(self, adapter: Adapter) -> None:
        """Load an adapter unless it is loaded. RequestError if it does not fit the model."""
        if adapter.key not in self._loaded:
            self._loaded[adapter.key] = self._read(adapter)
            logger.info("Loaded adapter %s from %s.", adapter.name, adapter.path)

    def drop(self, key: str) -> None:
        """Remove an adapter that no request names. Steps under way may still have rows of ended requests."""
        adapter = self._loaded.pop(key, None)
        if adapter is not None:
            self._leaving[key] = adapter, self._num_steps

    def begin_step(self, keys: Sequence[str | None], query_lens: IntArray) -> None:
        """Assign the rows of a step their adapters, given the key of each sequence's adapter."""
        self._num_steps += 1
        self.step.begin_step([None if key is None else self._find(key) for key in keys], query_lens)
        for key, (_, dropped_at) in list(self._leaving.items()):
            if self._num_steps - dropped_at > STEPS_TO_STAY:
                del self._leaving[key]

    def _find(self, key: str) -> LoadedAdapter:
        return self._loaded[key] if key in self._loaded else self._leaving[key][0]

    def _read(self, adapter: Adapter) -> LoadedAdapter:
        pieces: dict[int, list[Piece]] = {}
        linears, digest = read_adapter(Path(adapter.path), self._max_rank)
        if digest != adapter.digest:
            raise RequestError(
                f"Adapter {adapter.name!r} in {adapter.path} has changed since it was loaded; load it again "
                "(load_inplace).",
                "lora_path",
            )
        for (number, name), weights in linears.items():
            if number >= self._num_all_layers:
                raise self._misfit(adapter, f"the model has no layer {number}")
            if number not in self._layers:
                continue  # the layer is in another stage
            index = number - self._layers.start
            place = self._places[index].get(name)
            if place is None:
                raise self._misfit(
                    adapter, f"layers.{number}.{name} is not a linear that adapters may change here"
                )
            own = place.part_of(weights)
            if own is None:
                raise self._misfit(adapter, f"layers.{number}.{name} has other sizes in this model")
            pieces.setdefault(index * self._numbers_each + place.linear, []).append(self._piece(place, own))
        return LoadedAdapter(pieces)

    def _piece(self, place: Place, own: LowRankWeights) -> Piece:
        def placed(weight: torch.Tensor) -> torch.Tensor:
            return weight.to(self._device, self._dtype).contiguous()

        return Piece(place.first, placed(own.down), placed(own.up), own.scale)

    def _misfit(self, adapter: Adapter, what: str) -> RequestError:
        return RequestError(f"Adapter {adapter.name!r} does not fit: {what}.", "lora_path")


def open_adapters(
    model: CausalModel, config: LoRAConfig | None, group: TensorParallelGroup, attention: str
) -> AdapterStore | None:
    """The store, with all configured adapters; None without adapters. ConfigError if the model does not
    support adapters, or one cannot be loaded."""
    if config is None:
        return None
    if attention == "triton":
        raise ConfigError("enable_lora needs attention_backend torch: the Triton path adds no adapters yet.")
    store = AdapterStore(model, config, group)
    for adapter in config.modules:
        try:
            store.load(adapter)
        except RequestError as error:
            raise ConfigError(f"lora_modules: {error}") from error
    return store


def _wrap(layer: DecoderLayer, joined: JoinedLinear, index: int, step: StepAdapters) -> None:
    part, name = _JOINED_NAMES[joined]
    parent: nn.Module = layer.get_submodule(part)
    if isinstance(parent, AttentionBesideState):
        parent = parent.attention
    plain = parent.get_submodule(name)
    if isinstance(plain, RowParallelLinear):  # additions are summed with the ranks' outputs
        parent = plain
        name = "partial"
        plain = plain.partial
    setattr(parent, name, LowRankLinear(plain, index * NUM_JOINED + joined, step))
