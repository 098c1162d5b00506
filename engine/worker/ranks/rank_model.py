"""Loads a rank's part of the model, after all ranks have joined."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.config.engine_config import EngineConfig
from engine.config.parallel import cores_sharing_experts
from engine.executor import Executor
from engine.worker.executor import UniProcExecutor
from engine.worker.loading.model_folder import choose_device
from engine.worker.memory import share_host_memory
from engine.worker.parallel.group import sharers
from engine.worker.parallel.process_group import ProcessGroup
from engine.worker.ranks.rank_messages import RankStart, rank_places


def load(start: RankStart) -> Executor:
    """Return the executor of this rank's part of each step. Raises ModelLoadError or ConfigError with a
    one-sentence message."""
    share_host_memory(start.config.parallel.num_local)
    place = start.place
    device = choose_device(start.config.model.device, place.local_rank, place.local_size)
    group = ProcessGroup(place, device)
    torch.set_num_threads(max(1, torch.get_num_threads() // sharers(group, device)))
    return UniProcExecutor(_without_plans_ahead(start.config), group)


def load_lone_rank(config: EngineConfig) -> Executor:
    """Like ``load``, in the core's own process, for the only rank of a core that shares experts."""
    [place] = rank_places(config, "")
    group = ProcessGroup(place, choose_device(config.model.device))
    return UniProcExecutor(_without_plans_ahead(config), group)


def _without_plans_ahead(config: EngineConfig) -> EngineConfig:
    """The configuration, with one step at a time if cores share experts."""
    if cores_sharing_experts(config) == 1:
        return config
    return replace(config, scheduler=replace(config.scheduler, async_scheduling=False))
