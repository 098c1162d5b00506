"""Chooses the code for layers with states on a device: the fastest that works there, else plain torch."""

from __future__ import annotations

import logging
from functools import cache
from typing import Protocol

import torch

from engine.worker.cpu.kernels.library import KernelUnavailable
from engine.worker.cpu.state_kernels import state_kernels
from engine.worker.gpu.ops import uses_triton
from engine.worker.states import torch_states
from engine.worker.states.state_batch import StateBatch

logger = logging.getLogger(__name__)


class StateOps(Protocol):
    """The functions of ``torch_states``, which defines what each computes."""

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        pool: torch.Tensor,
        batch: StateBatch,
        *,
        silu: bool = False,
    ) -> torch.Tensor:
        """x [num_tokens, channels], weight [channels, width], bias [channels],
        pool [num_slots, channels, width - 1] -> [num_tokens, channels]"""

    def gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        pool: torch.Tensor,
        batch: StateBatch,
    ) -> torch.Tensor:
        """q, k [num_tokens, k_heads, k_size], v [num_tokens, v_heads, v_size], g and beta [num_tokens,
        v_heads], pool [num_slots, v_heads, k_size, v_size] in fp32 -> [num_tokens, v_heads, v_size]"""

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor,
        dt_bias: torch.Tensor,
        pool: torch.Tensor,
        batch: StateBatch,
    ) -> torch.Tensor:
        """x [num_tokens, heads, head_size], dt [num_tokens, heads], a, d and dt_bias [heads], b and c
        [num_tokens, groups, state_size], pool [num_slots, heads, head_size, state_size] in fp32
        -> [num_tokens, heads, head_size]"""


@cache
def select_state_ops(device: torch.device) -> StateOps:
    """Compiled code on a CPU with a compiler, Triton's kernels on CUDA, otherwise torch."""
    if device.type == "cuda" and uses_triton(device):
        from engine.worker.gpu.triton_states import TritonStates

        return TritonStates()
    if device.type == "cpu":
        try:
            return state_kernels()
        except KernelUnavailable as reason:
            logger.warning("Computing states in torch, which is slower: %s.", reason)
    return torch_states
