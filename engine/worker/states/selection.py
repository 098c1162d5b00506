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
from engine.worker.states.operations import ChannelScan, Convolution, DeltaRule, Scan
from engine.worker.states.state_batch import StateBatch

logger = logging.getLogger(__name__)


class StateOps(Protocol):
    """The functions of ``torch_states``, which defines what each computes."""

    def causal_conv(self, conv: Convolution, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """pool [num_slots, channels, width - 1] -> [num_tokens, channels]"""

    def gated_delta_rule(self, rule: DeltaRule, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """pool [num_slots, v_heads, k_size, v_size] in fp32 -> [num_tokens, v_heads, v_size]"""

    def selective_scan(self, scan: Scan, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """pool [num_slots, heads, head_size, state_size] in fp32 -> [num_tokens, heads, head_size]"""

    def channel_scan(self, scan: ChannelScan, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """pool [num_slots, channels, state_size] in fp32 -> [num_tokens, channels] in fp32"""


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
