"""Sleep, wake-up and new weights of a model on a CPU: its memory goes back to the system and comes again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.config import ModelConfig
from engine.errors import EngineError, RequestError
from engine.process.trim import give_back_freed
from engine.worker.loading.loader import LoadedModel, load_model
from engine.worker.memory import release_pages
from engine.worker.parallel.group import TensorParallelGroup

KV_ONLY, WEIGHTS_TOO = 1, 2
"""Levels of sleep. On a GPU the first would keep the weights in host memory, where they are here."""

TakeModel = Callable[[LoadedModel | None], None]


class Resting:
    """A model that can be dropped and loaded again. Called while no step runs."""

    def __init__(
        self, options: ModelConfig, loaded: LoadedModel, pool: torch.Tensor, group: TensorParallelGroup
    ) -> None:
        self._options = options
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
        loaded = load_model(options, self._group)
        sizes = loaded.vocab_size, loaded.model.num_layers, loaded.dtype
        if sizes != (self._vocab_size, self._num_layers, self._dtype):
            raise RequestError(f"{options.model} has other sizes than the model that is served.", "path")
        take(loaded)
        self._options, self._has_weights = options, True
