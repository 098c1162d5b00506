"""The adapters of an engine core: loaded when a request names them, dropped when none does."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from engine.config.lora import LoRAConfig
from engine.core_process.core_part import CorePart
from engine.errors import RequestError
from engine.executor import Executor
from engine.records.adapters import Adapter
from engine.records.messages import EngineCoreRequest


class CoreAdapters(CorePart):
    """Thread-safe; may be called while a step is running."""

    def __init__(
        self, executor: Executor, config: LoRAConfig | None, in_use: Callable[[], set[str | None]]
    ) -> None:
        """``in_use``: the keys of the adapters of all requests that have not ended."""
        self._executor = executor
        self._config = config
        self._in_use = in_use
        self._loading = threading.Lock()
        modules = () if config is None else config.modules
        self._loaded = OrderedDict((adapter.key, adapter) for adapter in modules)
        """Loaded adapters by key, the least recently named first."""
        self._unwanted: set[str] = set()
        """Keys of unloaded adapters that requests still had."""

    def opening(self, message: EngineCoreRequest) -> None:
        self.ensure(message.adapter)

    def utilities(self) -> dict[str, Callable[..., Any]]:
        return {"load_adapter": self.load_adapter, "unload_adapter": self.unload_adapter}

    def ensure(self, adapter: Adapter | None) -> None:
        """Load the adapter that a request names, unless it is loaded. RequestError if it cannot be."""
        if adapter is None:
            return
        if self._config is None:
            raise RequestError("This engine has no adapters: enable_lora is off.", "model")
        with self._loading:
            if adapter.key in self._loaded:
                self._loaded.move_to_end(adapter.key)
            else:
                self._executor.call_worker("load_adapter", adapter)
                self._loaded[adapter.key] = adapter
            self._unwanted.discard(adapter.key)
            if len(self._loaded) > self._most or self._unwanted:
                self._sweep(keep=adapter.key)

    def load_adapter(self, name: str, path: str, digest: str) -> None:
        self.ensure(Adapter(name, path, digest))

    def unload_adapter(self, key: str) -> None:
        """Drop an adapter; if requests have it, when they have ended and another one is loaded or dropped."""
        with self._loading:
            self._unwanted.add(key)
            self._sweep(keep=None)

    @property
    def _most(self) -> int:
        assert self._config is not None
        return self._config.max_cpu_loras or len(self._loaded)

    def _sweep(self, keep: str | None) -> None:
        """Drop unwanted adapters, and those beyond the limit, unless a request has them."""
        kept = self._in_use() | {keep}
        for key in list(self._loaded):
            too_many = self._config is not None and len(self._loaded) > self._most
            if key not in kept and (too_many or key in self._unwanted):
                self._executor.call_worker("drop_adapter", key)
                del self._loaded[key]
                self._unwanted.discard(key)
