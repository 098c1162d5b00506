"""The sizes and switches by which a decoder's parts are built, and what of them each rank has. Knows no
family."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DenseMLP:
    """A gated MLP: every token goes through all of it."""

    intermediate_size: int
    bias: bool = False

    def of_rank(self, num_ranks: int) -> DenseMLP:
        """The shape of each rank's part. ConfigError if it cannot be split that way."""
        size = split("intermediate size,", self.intermediate_size, num_ranks)
        return replace(self, intermediate_size=size)


MLPShape = DenseMLP


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes and switches in which decoders differ."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    windows: tuple[int | None, ...]
    """The attention window of each layer, None for full attention."""
    mlps: tuple[MLPShape, ...]
    """The MLP of each layer."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    num_kv_copies: int = 1
    """Number of ranks with the same key-value heads, if there are fewer heads than ranks."""

    def of_rank(self, num_ranks: int) -> DecoderShape:
        """The shape of each rank's part: some of the heads and of each MLP. ConfigError if the model cannot
        be split that way."""
        num_heads = split("number of heads,", self.num_heads, num_ranks)
        mlps = tuple(mlp.of_rank(num_ranks) for mlp in self.mlps)
        split("vocabulary size,", self.vocab_size, num_ranks)
        if self.num_kv_heads % num_ranks and num_ranks % self.num_kv_heads:
            raise ConfigError(
                f"tensor_parallel_size is {num_ranks}, which neither divides the number of the model's "
                f"key-value heads, {self.num_kv_heads}, nor is a multiple of it."
            )
        return replace(
            self,
            num_heads=num_heads,
            num_kv_heads=max(1, self.num_kv_heads // num_ranks),
            num_kv_copies=max(1, num_ranks // self.num_kv_heads),
            mlps=mlps,
        )

    @property
    def num_layers(self) -> int:
        return len(self.mlps)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def split(name: str, number: int, num_ranks: int) -> int:
    """Each rank's share of a number. ConfigError with its ``name`` if it is no whole one."""
    if number % num_ranks:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, which does not divide the model's {name} {number}."
        )
    return number // num_ranks
