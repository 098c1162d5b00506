"""Loads a rank's part of the model, once all ranks have joined."""

from __future__ import annotations

import torch

from engine.executor import Executor
from engine.worker.executor import UniProcExecutor
from engine.worker.loading.model_folder import choose_device
from engine.worker.memory import share_host_memory
from engine.worker.parallel.group import sharers
from engine.worker.parallel.process_group import ProcessGroup
from engine.worker.ranks.rank_messages import RankStart


def load(start: RankStart) -> Executor:
    """Return the executor of this rank's part of each step. Raises ModelLoadError or ConfigError with one
    sentence."""
    share_host_memory(start.config.parallel.num_local)
    place = start.place
    device = choose_device(start.config.model.device, place.local_rank, place.local_size)
    group = ProcessGroup(place, device)
    torch.set_num_threads(max(1, torch.get_num_threads() // sharers(group, device)))
    return UniProcExecutor(start.config, group)
