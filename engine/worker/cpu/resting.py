"""Sleep, wake-up and new weights of a model on a CPU: frees its memory and allocates it again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.config.engine_config import EngineConfig, ModelConfig
from engine.errors import EngineError, RequestError
from engine.process.trim import give_back_freed
from engine.worker.loading.identity import FRONT_FILES, Stamps, stamps_of
from engine.worker.loading.loader import LoadedModel
from engine.worker.loading.model_folder import raw_config, resolve_folder
from engine.worker.memory import release_pages
from engine.worker.parallel.group import TensorParallelGroup
from engine.worker.pooling.loading import load

KV_ONLY = 1
WEIGHTS_TOO = 2
"""Levels of sleep. On a GPU the first would move the weights to host memory; here they already are there."""

MAX_NAMES = 8
"""The most fields of a config that an error message names."""
_INCIDENTAL = ("_name_or_path", "transformers_version", "use_cache")

TakeModel = Callable[[LoadedModel | None], None]


class Resting:
    """A model that can be dropped and loaded again. Call its methods while no step runs."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        memories: Sequence[torch.Tensor],
        group: TensorParallelGroup,
    ) -> None:
        """``memories``: what a sleep frees beside the weights: the KV pool, and that of states."""
        self._config = config
        self.options = config.model
        """The options of the served model: ``model`` is the folder of its weights."""
        self.stamps: Stamps | None = None
        """The stamps of the files of the weights loaded last; ``CPUBackend.take_stamps`` takes them."""
        self._pooling = loaded.pooling
        self._max_model_len = loaded.max_model_len
        self._vocab_size = loaded.vocab_size
        self._num_layers = loaded.model.num_layers
        self._dtype = loaded.dtype
        self._memories = memories
        self._group = group
        self._has_weights = True

    def sleep(self, level: int, take: TakeModel) -> None:
        """Free the memory of KV and states, and at level ``WEIGHTS_TOO`` that of the weights."""
        for memory in self._memories:
            release_pages(memory)
        if level == WEIGHTS_TOO:
            self._drop(take)

    def wake_up(self, take: TakeModel) -> None:
        """Load the weights if they were dropped; other memory is allocated again at first use."""
        if not self._has_weights:
            self._load(self.options, take)

    def check_weights(self, folder: str) -> None:
        """Check by its config that a folder has the served architecture; RequestError if not. Errors in its
        tensors are found when they are read."""
        try:
            mine, other = (_architecture(each) for each in (self.options.model, folder))
        except EngineError as error:
            raise RequestError(f"The weights in {folder} cannot be served: {error}", "path") from error
        changed = sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name))
        if changed:
            raise RequestError(
                f"The model in {folder} is not the one that is served: its config differs in "
                f"{', '.join(changed[:MAX_NAMES])}.",
                "path",
            )
        other_files = [name for name in FRONT_FILES if not _equal_files(self.options.model, folder, name)]
        if other_files:
            raise RequestError(
                f"The model in {folder} reads prompts in another way than the one that is served: "
                f"{', '.join(other_files)} differ.",
                "path",
            )

    def update_weights(self, folder: str | None, take: TakeModel) -> None:
        """Serve the weights of another folder of the same architecture; None: those of the start. If they
        cannot be served, load the previous ones again and raise RequestError."""
        before = self.options
        new = self._config.model if folder is None else replace(before, model=folder)
        self._drop(take)
        try:
            self._load(new, take)
        except Exception as error:
            self._load(before, take)
            raise RequestError(f"The weights in {new.model} cannot be served: {error}", "path") from error

    @property
    def has_weights(self) -> bool:
        return self._has_weights

    def _drop(self, take: TakeModel) -> None:
        self._has_weights = False
        take(None)
        give_back_freed()

    def _load(self, options: ModelConfig, take: TakeModel) -> None:
        options = replace(options, max_model_len=self._max_model_len)
        self.stamps = stamps_of(self._config, options)
        loaded = load(replace(self._config, model=options), self._group)
        sizes = loaded.vocab_size, loaded.model.num_layers, loaded.dtype
        if sizes != (self._vocab_size, self._num_layers, self._dtype):
            raise RequestError(f"{options.model} has other sizes than the model that is served.", "path")
        if loaded.pooling != self._pooling:  # API servers already know it
            raise RequestError(f"{options.model} pools in another way than the model that is served.", "path")
        take(loaded)
        self.options = options
        self._has_weights = True


def _equal_files(mine: str, other: str, name: str) -> bool:
    """Whether a file has the same content in both folders, regardless of layout, or is missing in both."""
    return _content(mine, name) == _content(other, name)


def _content(model: str, name: str) -> object:
    path = resolve_folder(model) / name
    if not path.is_file():
        return None
    raw = path.read_bytes()
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw


def _architecture(model: str) -> dict[str, Any]:
    """The fields of a folder's config that describe the model."""
    config = raw_config(resolve_folder(model))
    return {name: value for name, value in config.items() if name not in _INCIDENTAL}
