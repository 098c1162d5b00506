"""How many engine cores a server has, and on which machines."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.config.engine_config import EngineConfig

MAX_ENGINES = 1024
DATA_PARALLEL_BACKENDS = ("mp", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Engine cores that serve the same model and share API servers."""

    data_parallel_size: int = 1
    """Number of engine cores, each with its own copy of the weights and its own KV cache."""
    data_parallel_size_local: int | None = None
    """How many of them run on this machine; None: all, or none of them where Ray places them."""
    data_parallel_size_min: int | None = None
    """Number of cores, the first ones, that must be ready before the head serves; the others join later.
    None: all."""
    data_parallel_start_rank: int = 0
    """Number of the first core on this machine; those of the head begin with 0."""
    data_parallel_address: str = "127.0.0.1"
    """Address at which the group's head listens for nodes."""
    data_parallel_rpc_port: int = 29550
    """Port at which the group's head listens for nodes."""
    data_parallel_backend: str = "mp"
    """Who starts the cores that do not run here: ``mp``: nodes that join, ``ray``: actors of Ray."""
    headless: bool = False
    """Run cores of a group whose API servers are on another machine."""
    data_parallel_rank: int = 0
    """The number of the core that has this configuration."""
    data_parallel_master_port: int = 0
    """Port of the first core at which cores that share experts meet; 0: the one after
    data_parallel_rpc_port."""

    def __post_init__(self) -> None:
        size = self.data_parallel_size
        if not 1 <= size <= MAX_ENGINES:
            raise ConfigError(f"data_parallel_size must be from 1 to {MAX_ENGINES}, got {size}.")
        if not 0 <= self.data_parallel_rank < size:
            raise ConfigError(
                f"data_parallel_rank must be at least 0 and below {size}, got {self.data_parallel_rank}."
            )
        if not 1 <= self.data_parallel_rpc_port <= 65535:
            raise ConfigError(
                f"data_parallel_rpc_port must be from 1 to 65535, got {self.data_parallel_rpc_port}."
            )
        self._check_local()
        self._check_least()
        self._check_backend()

    def _check_local(self) -> None:
        first = self.data_parallel_start_rank
        local = self.data_parallel_size_local
        least = 1 if self.headless else 0
        if local is not None and not least <= local <= self.data_parallel_size:
            raise ConfigError(
                f"data_parallel_size_local must be from {least} to data_parallel_size "
                f"({self.data_parallel_size}), got {local}."
            )
        if self.headless and local is None:
            raise ConfigError("headless needs data_parallel_size_local: how many cores this node runs.")
        if not self.headless and first:
            raise ConfigError("data_parallel_start_rank is for headless: the head's cores begin with 0.")
        if first < 0 or first + (local or 0) > self.data_parallel_size:
            raise ConfigError(
                f"data_parallel_start_rank {first} and data_parallel_size_local {local} go beyond "
                f"data_parallel_size {self.data_parallel_size}."
            )
        if local == 0 and self.data_parallel_size == 1:
            raise ConfigError("data_parallel_size_local 0 needs data_parallel_size above 1.")

    def _check_least(self) -> None:
        least = self.data_parallel_size_min
        if least is None:
            return
        if not 1 <= least <= self.data_parallel_size:
            raise ConfigError(
                f"data_parallel_size_min must be from 1 to data_parallel_size ({self.data_parallel_size}), "
                f"got {least}."
            )
        if self.headless:
            raise ConfigError("data_parallel_size_min is for the head of a group, not for headless.")

    def _check_backend(self) -> None:
        if self.data_parallel_backend not in DATA_PARALLEL_BACKENDS:
            raise ConfigError(
                f"data_parallel_backend must be one of {', '.join(DATA_PARALLEL_BACKENDS)}, got "
                f"{self.data_parallel_backend!r}."
            )
        if self.data_parallel_backend != "ray":
            return
        if self.headless:
            raise ConfigError("data_parallel_backend ray starts the nodes itself: headless must be off.")
        if self.data_parallel_size == 1:
            raise ConfigError("data_parallel_backend ray needs data_parallel_size above 1.")

    def check_beside(self, config: EngineConfig) -> None:
        """Raise ConfigError if other options conflict with these."""
        if self.data_parallel_backend == config.model.distributed_executor_backend == "ray":
            raise ConfigError(
                "data_parallel_backend ray needs distributed_executor_backend mp: a core and its ranks are "
                "on one node."
            )
        if config.model.pipeline_parallel_size > 1:
            for option, is_set in _not_in_stages(config).items():
                if is_set:
                    raise ConfigError(f"{option} and pipeline_parallel_size > 1 cannot be combined.")
        if cores_sharing_experts(config) > 1:
            for option, is_set in _not_beside_shared_experts(config).items():
                if is_set:
                    raise ConfigError(
                        f"{option} and enable_expert_parallel with data_parallel_size > 1, where engine "
                        "cores share the experts, cannot be combined."
                    )

    @property
    def meeting_point(self) -> str:
        """URL by which torch.distributed lets cores that share experts find each other."""
        host = self.data_parallel_address
        port = self.data_parallel_master_port or self.data_parallel_rpc_port + 1
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    @property
    def num_awaited(self) -> int:
        """How many cores the head waits for before it serves: those with the lowest numbers."""
        least = self.data_parallel_size_min
        return self.data_parallel_size if least is None else least

    @property
    def num_local(self) -> int:
        """How many cores run on this machine."""
        if self.data_parallel_size_local is not None:
            return self.data_parallel_size_local
        return 0 if self.data_parallel_backend == "ray" else self.data_parallel_size

    @property
    def local_engines(self) -> range:
        """Numbers of the cores that run on this machine."""
        return range(self.data_parallel_start_rank, self.data_parallel_start_rank + self.num_local)

    @property
    def local_rank(self) -> int:
        """The number of the core that has this configuration among those of its machine."""
        return self.data_parallel_rank - self.data_parallel_start_rank


def ranks_per_core(config: EngineConfig) -> int:
    """How many ranks run the model of one engine core."""
    return config.model.tensor_parallel_size * config.model.pipeline_parallel_size


def cores_sharing_experts(config: EngineConfig) -> int:
    """How many engine cores share a model's experts; 1: each has all of them."""
    return config.parallel.data_parallel_size if config.model.enable_expert_parallel else 1


def _not_beside_shared_experts(config: EngineConfig) -> dict[str, bool]:
    """Options that cores which share experts do not support yet, and whether each is set."""
    return {
        "pipeline_parallel_size > 1": config.model.pipeline_parallel_size > 1,
        "async_scheduling": bool(config.scheduler.async_scheduling),
        "speculative_config with weights": config.speculative is not None and config.speculative.has_weights,
        "enable_return_routed_experts": config.model.enable_return_routed_experts,
        "distributed_executor_backend ray": config.model.distributed_executor_backend == "ray",
        "data_parallel_backend ray": config.parallel.data_parallel_backend == "ray",
        "data_parallel_size_min": config.parallel.data_parallel_size_min is not None,
        "data_parallel_size_local 0": config.parallel.data_parallel_size_local == 0,
    }


def _not_in_stages(config: EngineConfig) -> dict[str, bool]:
    """Options that a pipeline does not support yet, and whether each is set."""
    return {
        "async_scheduling": bool(config.scheduler.async_scheduling),
        "speculative_config": config.speculative is not None,
        "quantization": config.model.quantization is not None,
        "enable_return_routed_experts": config.model.enable_return_routed_experts,
        "kv_offloading_disk_size": config.cache.has_disk_tier,
        "kv_transfer_config": config.kv_transfer is not None,
    }


def is_loopback(host: str) -> bool:
    """Whether no other machine can reach this address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
