"""Sleep, wake-up and new weights of a model on a CPU: its memory goes back to the system and comes again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from engine.config import EngineConfig, ModelConfig
from engine.errors import EngineError, RequestError
from engine.process.trim import give_back_freed
from engine.worker.loading.loader import LoadedModel
from engine.worker.loading.model_folder import raw_config, resolve_folder
from engine.worker.memory import release_pages
from engine.worker.parallel.group import TensorParallelGroup
from engine.worker.pooling.loading import load

KV_ONLY, WEIGHTS_TOO = 1, 2
"""Levels of sleep. On a GPU the first would keep the weights in host memory, where they are here."""

MAX_NAMES = 8
"""The most fields of a config that a message names."""
_INCIDENTAL = ("_name_or_path", "transformers_version", "use_cache")

TakeModel = Callable[[LoadedModel | None], None]


class Resting:
    """A model that can be dropped and loaded again. Called while no step runs."""

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, pool: torch.Tensor, group: TensorParallelGroup
    ) -> None:
        self._config, self._options = config, config.model
        self._pooling = loaded.pooling
        self._max_model_len, self._vocab_size = loaded.max_model_len, loaded.vocab_size
        self._num_layers, self._dtype = loaded.model.num_layers, loaded.dtype
        self._pool = pool
        self._group = group
        self._has_weights = True

    def sleep(self, level: int, take: TakeModel) -> None:
        """Give back the KV pool's memory, and of ``WEIGHTS_TOO`` that of the weights."""
        release_pages(self._pool)
        if level == WEIGHTS_TOO:
            self._drop(take)

    def wake_up(self, take: TakeModel) -> None:
        """Load the weights if they were dropped; the KV pool's memory comes with its first use."""
        if not self._has_weights:
            self._load(self._options, take)

    def check_weights(self, folder: str) -> None:
        """Check from its config that a folder has the architecture that is served; RequestError if not. What
        is wrong with its tensors is found when they are read."""
        try:
            mine, other = (_architecture(each) for each in (self._options.model, folder))
        except EngineError as error:
            raise RequestError(f"The weights in {folder} cannot be served: {error}", "path") from error
        changed = sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name))
        if changed:
            raise RequestError(
                f"The model in {folder} is not the one that is served: its config differs in "
                f"{', '.join(changed[:MAX_NAMES])}.",
                "path",
            )

    def update_weights(self, folder: str, take: TakeModel) -> None:
        """Serve the weights of another folder of the same architecture. If they cannot be served, those
        before are loaded again, and RequestError is raised."""
        self._drop(take)
        try:
            self._load(replace(self._options, model=folder), take)
        except EngineError as error:
            self._load(self._options, take)
            raise RequestError(f"The weights in {folder} cannot be served: {error}", "path") from error

    def _drop(self, take: TakeModel) -> None:
        self._has_weights = False
        take(None)
        give_back_freed()

    def _load(self, options: ModelConfig, take: TakeModel) -> None:
        options = replace(options, max_model_len=self._max_model_len)
        loaded = load(replace(self._config, model=options), self._group)
        sizes = loaded.vocab_size, loaded.model.num_layers, loaded.dtype
        if sizes != (self._vocab_size, self._num_layers, self._dtype):
            raise RequestError(f"{options.model} has other sizes than the model that is served.", "path")
        if loaded.pooling != self._pooling:  # which API servers have been told
            raise RequestError(f"{options.model} pools in another way than the model that is served.", "path")
        take(loaded)
        self._options, self._has_weights = options, True


def _architecture(model: str) -> dict[str, Any]:
    """What a folder's config says of the model."""
    config = raw_config(resolve_folder(model))
    return {name: value for name, value in config.items() if name not in _INCIDENTAL}
