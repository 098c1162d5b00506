"""How many engine cores a server has."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError

MAX_ENGINES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Engine cores that serve the same model behind the same API servers."""

    data_parallel_size: int = 1
    """Number of engine cores, each with its own copy of the weights and its own KV cache."""
    data_parallel_rank: int = 0
    """The number of the core that has this configuration."""

    def __post_init__(self) -> None:
        if not 1 <= self.data_parallel_size <= MAX_ENGINES:
            raise ConfigError(
                f"data_parallel_size must be from 1 to {MAX_ENGINES}, got {self.data_parallel_size}."
            )
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise ConfigError(
                f"data_parallel_rank must be at least 0 and below {self.data_parallel_size}, got "
                f"{self.data_parallel_rank}."
            )
