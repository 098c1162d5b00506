"""The operations of layers with states: what each takes for the tokens of a step, beside the states."""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self

import torch

Tokens = torch.Tensor | slice
"""Which of a step's tokens: [n] their numbers, or consecutive ones."""


class OverTokens(Protocol):
    """An operation's inputs, some of which have a row for each token."""

    def of_tokens(self, tokens: Tokens) -> Self:
        """The inputs of some tokens only."""


class Convolution(NamedTuple):
    """Each channel is convolved with its own kernel, over a token and those before it."""

    x: torch.Tensor
    """[num_tokens, channels]"""
    weight: torch.Tensor
    """[channels, width]"""
    bias: torch.Tensor | None = None
    """[channels]"""
    has_silu: bool = False
    """Whether SiLU follows."""

    def of_tokens(self, tokens: Tokens) -> Convolution:
        return self._replace(x=self.x[tokens])


class DeltaRule(NamedTuple):
    """Linear attention: the state maps keys to values, and each token corrects the value of its key (Gated
    DeltaNet, arXiv:2412.06464, equation 10)."""

    q: torch.Tensor
    """Queries [num_tokens, k_heads, k_size], not normalized."""
    k: torch.Tensor
    """Keys [num_tokens, k_heads, k_size], not normalized."""
    v: torch.Tensor
    """Values [num_tokens, v_heads, v_size]."""
    g: torch.Tensor
    """Logarithms of the decays [num_tokens, v_heads], or [num_tokens, v_heads, k_size] if each row of a state
    decays by its own (Kimi Delta Attention, arXiv:2510.26692, section 3)."""
    beta: torch.Tensor
    """Learning rates [num_tokens, v_heads]."""

    def of_tokens(self, tokens: Tokens) -> DeltaRule:
        return DeltaRule(*(each[tokens] for each in self))


class ChannelScan(NamedTuple):
    """Mamba's state space model (arXiv:2312.00752, section 3): like ``Scan``, but each number of a channel's
    state has a decay of its own."""

    x: torch.Tensor
    """[num_tokens, channels]"""
    dt: torch.Tensor
    """Time steps [num_tokens, channels], before their bias and softplus."""
    b: torch.Tensor
    """[num_tokens, state_size]"""
    c: torch.Tensor
    """[num_tokens, state_size]"""
    a: torch.Tensor
    """[channels, state_size]"""
    dt_bias: torch.Tensor
    """[channels]"""

    def of_tokens(self, tokens: Tokens) -> ChannelScan:
        x, dt, b, c = (each[tokens] for each in (self.x, self.dt, self.b, self.c))
        return self._replace(x=x, dt=dt, b=b, c=c)


class Scan(NamedTuple):
    """Mamba-2's state space model (arXiv:2405.21060, section 7): the state decays by exp(dt * a), dt * x ⊗ b
    is added to it, and c reads it; d * x is added to what is read."""

    x: torch.Tensor
    """[num_tokens, heads, head_size]"""
    dt: torch.Tensor
    """Time steps [num_tokens, heads], before their bias and softplus."""
    b: torch.Tensor
    """[num_tokens, groups, state_size]"""
    c: torch.Tensor
    """[num_tokens, groups, state_size]"""
    a: torch.Tensor
    """[heads]"""
    d: torch.Tensor
    """[heads]"""
    dt_bias: torch.Tensor
    """[heads]"""

    def of_tokens(self, tokens: Tokens) -> Scan:
        x, dt, b, c = (each[tokens] for each in (self.x, self.dt, self.b, self.c))
        return self._replace(x=x, dt=dt, b=b, c=c)
