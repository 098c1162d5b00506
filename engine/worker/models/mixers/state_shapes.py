"""The sizes of layers that keep a state of fixed size per sequence, and each rank's part of them. Knows no
family."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.worker.models.shape import split
from engine.worker.states.state_pool import StatePart


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """A gated delta net; see ``GatedDeltaNet``. Sizes of heads are counts of numbers."""

    num_k_heads: int
    num_v_heads: int
    k_size: int
    v_size: int
    conv_width: int
    by_head: bool = True
    """Whether a checkpoint's projections group their outputs by key head; otherwise by kind."""
    separate: bool = False
    """Whether a checkpoint has a projection and a convolution for each kind, under Llama's names."""
    rate_scale: float = 1.0
    """A factor of learning rates: above 1, what is read back may be overwritten with its opposite."""
    norm_eps: float | None = None
    """The epsilon of the norm of outputs; None: that of other norms."""

    def of_rank(self, num_ranks: int) -> DeltaNetShape:
        """The shape of each rank's part. ConfigError if it cannot be split that way."""
        return replace(
            self,
            num_k_heads=split("number of key heads of linear attention,", self.num_k_heads, num_ranks),
            num_v_heads=split("number of value heads of linear attention,", self.num_v_heads, num_ranks),
        )

    @property
    def keys_size(self) -> int:
        """The size of all keys of a token, and of all its queries."""
        return self.num_k_heads * self.k_size

    @property
    def values_size(self) -> int:
        """The size of all values of a token."""
        return self.num_v_heads * self.v_size

    @property
    def conv_size(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.keys_size + self.values_size

    def state_parts(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        """The state per sequence of a model of ``dtype``."""
        recurrent = (self.num_v_heads, self.k_size, self.v_size)
        return (
            StatePart((self.conv_size, self.conv_width - 1), dtype),
            StatePart(recurrent, torch.float32),
        )


@dataclass(frozen=True, slots=True)
class MambaShape:
    """A Mamba-2 layer; see ``Mamba2``."""

    num_heads: int
    head_size: int
    num_groups: int
    """Groups of heads that share B, which writes to their state, and C, which reads it."""
    state_size: int
    conv_width: int
    conv_bias: bool
    bias: bool
    """Whether its first and last linear have a bias."""
    has_norm: bool = True
    """Whether gated outputs are normalized."""
    scales: tuple[float, ...] = ()
    """Factors of gates, heads' inputs, B, C and time steps; empty: none have one."""
    num_group_copies: int = 1
    """The number of ranks with the same group, if there is one for all."""

    def of_rank(self, num_ranks: int) -> MambaShape:
        """The shape of each rank's part. ConfigError if it cannot be split that way."""
        if self.num_groups > 1:
            split("number of groups of Mamba heads,", self.num_groups, num_ranks)
        return replace(
            self,
            num_heads=split("number of Mamba heads,", self.num_heads, num_ranks),
            num_groups=max(1, self.num_groups // num_ranks),
            num_group_copies=num_ranks if self.num_groups == 1 else 1,
        )

    @property
    def inner_size(self) -> int:
        """The size of all heads of a token."""
        return self.num_heads * self.head_size

    @property
    def groups_size(self) -> int:
        """The size of a token's B, which writes to the state, and of its C, which reads it."""
        return self.num_groups * self.state_size

    @property
    def conv_size(self) -> int:
        """The channels of the convolution: the heads' inputs, B and C."""
        return self.inner_size + 2 * self.groups_size

    def state_parts(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        """The state per sequence of a model of ``dtype``."""
        recurrent = (self.num_heads, self.head_size, self.state_size)
        return (
            StatePart((self.conv_size, self.conv_width - 1), dtype),
            StatePart(recurrent, torch.float32),
        )


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """A gated short convolution; see ``ShortConv``."""

    num_channels: int
    conv_width: int
    bias: bool
    """Whether the convolution and both linears have a bias."""

    def of_rank(self, num_ranks: int) -> ShortConvShape:
        """The shape of each rank's part. ConfigError if it cannot be split that way."""
        return replace(self, num_channels=split("number of channels,", self.num_channels, num_ranks))

    def state_parts(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        """The state per sequence of a model of ``dtype``."""
        return (StatePart((self.num_channels, self.conv_width - 1), dtype),)


@dataclass(frozen=True, slots=True)
class KimiDeltaShape:
    """Kimi Delta Attention; see ``KimiDelta``."""

    num_heads: int
    head_size: int
    conv_width: int

    def of_rank(self, num_ranks: int) -> KimiDeltaShape:
        """The shape of each rank's part. ConfigError if it cannot be split that way."""
        return replace(
            self, num_heads=split("number of heads of linear attention,", self.num_heads, num_ranks)
        )

    @property
    def heads_size(self) -> int:
        """The size of all heads of a token."""
        return self.num_heads * self.head_size

    @property
    def conv_size(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 3 * self.heads_size

    def state_parts(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        """The state per sequence of a model of ``dtype``."""
        recurrent = (self.num_heads, self.head_size, self.head_size)
        return (
            StatePart((self.conv_size, self.conv_width - 1), dtype),
            StatePart(recurrent, torch.float32),
        )


@dataclass(frozen=True, slots=True)
class Mamba1Shape:
    """A Mamba layer of the first kind, whose decays differ by channel and by number of the state; see
    ``Mamba1``."""

    num_channels: int
    state_size: int
    step_rank: int
    """The numbers from which a token's time steps are computed."""
    conv_width: int
    conv_bias: bool
    bias: bool
    """Whether its first and last linear have a bias."""

    def of_rank(self, num_ranks: int) -> Mamba1Shape:
        """The shape of each rank's part. ConfigError if it cannot be split that way."""
        return replace(self, num_channels=split("number of Mamba channels,", self.num_channels, num_ranks))

    def state_parts(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        """The state per sequence of a model of ``dtype``."""
        return (
            StatePart((self.num_channels, self.conv_width - 1), dtype),
            StatePart((self.num_channels, self.state_size), torch.float32),
        )


StateShape = DeltaNetShape | MambaShape | Mamba1Shape | ShortConvShape | KimiDeltaShape
