"""A rank's KV that leaves the process, under the identity of the loaded model."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.config.engine_config import EngineConfig, ModelConfig
from engine.errors import ModelLoadError
from engine.worker.kv_tiers.host_pool import HostTransfers
from engine.worker.kv_transfer.remote_transfers import RemoteTransfers, saved_place, with_remote
from engine.worker.loading.identity import Stamps, identity_of, stamps_of
from engine.worker.parallel.group import TensorParallelGroup

logger = logging.getLogger(__name__)


class SharedKV:
    """Manages KV that leaves the process; does nothing if none does."""

    def __init__(self, config: EngineConfig, group: TensorParallelGroup) -> None:
        """Make it before the model is loaded: it records the stamps of the model's files."""
        transfer = config.kv_transfer
        self._is_on = transfer is not None and transfer.is_used
        self._config = config
        self._group = group
        self._stamps: Stamps = stamps_of(config) if self._is_on else {}
        self._identity = ""
        self._pool = torch.empty(0)
        self._transfers: RemoteTransfers | None = None

    def loaded(self, pool: torch.Tensor) -> None:
        """Call it after the model is loaded and has its KV pool: [num_blocks, ...], block-major."""
        self._pool = pool
        self._identity = self._identity_of(self._config.model, self._stamps)

    @property
    def place(self) -> Path | None:
        """Where the loaded model's KV is kept; None if it is not."""
        return saved_place(self._config, self._identity, self._pool, self._group) if self._is_on else None

    def beside(self, base: HostTransfers | None) -> HostTransfers | None:
        """The transfers of the host tier, with those between servers. ConfigError like ``with_remote``."""
        transfers = with_remote(base, self._pool, self._config, self._group, self._identity)
        self._transfers = transfers if isinstance(transfers, RemoteTransfers) else None
        return transfers

    def calls(self) -> dict[str, Callable[..., Any]]:
        """What the core may call, by name; complete once ``beside`` was called."""
        transfer = self._config.kv_transfer
        hands_over = transfer is not None and transfer.hands_over
        return {"save_kv": self._transfers.save_now} if hands_over and self._transfers is not None else {}

    def rest(self) -> None:
        """Make KV unreadable from elsewhere, because the pool is about to change."""
        if self._transfers is not None:
            self._transfers.rest()

    def serve(self, options: ModelConfig, stamps: Stamps | None) -> None:
        """Continue under the identity of the last loaded model, whose files had these ``stamps``; None: no
        model was loaded."""
        if stamps is None or self._transfers is None:
            return
        self._identity = self._identity_of(options, stamps)
        self._transfers.serve(self._identity)

    def _identity_of(self, options: ModelConfig, stamps: Stamps) -> str:
        """The identity, or a unique one if the files were written to while they were loaded."""
        if not self._is_on:
            return ""
        try:
            return identity_of(self._config, options, stamps)
        except ModelLoadError as error:
            logger.warning("The KV of this server is not shared with other servers: %s", error)
            return secrets.token_hex(16)
