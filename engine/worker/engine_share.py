"""Limits an engine core that shares its machine to its own GPUs and its own part of the CPU cores.

Needs no torch, which counts cores and devices when it is imported.
"""

from __future__ import annotations

import os
from pathlib import Path

from engine.config.engine_config import EngineConfig
from engine.config.parallel import ranks_per_core
from engine.errors import ConfigError
from engine.worker.cpu.cores import AFFINITY_VARIABLES, share_of_cores

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def take_share(config: EngineConfig, devices: Path = Path("/dev")) -> None:
    """Restrict this process, and those that it starts, to this engine core's share of the machine.
    ConfigError if there are GPUs, but too few for all cores."""
    if config.model.device != "cpu" and (visible := _visible_gpus(devices)):
        os.environ[VISIBLE_DEVICES] = ",".join(_gpus_of(config, visible))
    if not any(name in os.environ for name in AFFINITY_VARIABLES):
        _take_cpus(config.parallel.local_rank, config.parallel.num_local)


def _take_cpus(index: int, count: int) -> None:
    cpus = share_of_cores(index, count)
    if cpus:
        os.sched_setaffinity(0, cpus)


def _visible_gpus(devices: Path) -> list[str]:
    """The GPUs that this process may use, by the names that CUDA takes."""
    chosen = os.environ.get(VISIBLE_DEVICES)
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    numbers = sorted(
        int(path.name.removeprefix("nvidia"))
        for path in devices.glob("nvidia[0-9]*")
        if path.name.removeprefix("nvidia").isdigit()
    )
    return [str(number) for number in range(len(numbers))]


def _gpus_of(config: EngineConfig, visible: list[str]) -> list[str]:
    size = config.parallel.num_local
    num_ranks = ranks_per_core(config)
    needed = size * num_ranks
    if len(visible) < needed:
        raise ConfigError(
            f"{size} engine cores of {num_ranks} ranks each need {needed} GPUs on this machine, "
            f"but there are {len(visible)}."
        )
    first = config.parallel.local_rank * num_ranks
    return visible[first : first + num_ranks]
