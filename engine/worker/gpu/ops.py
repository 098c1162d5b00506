"""The elementwise ops between a decoder's GEMMs: one Protocol; Triton on a GPU, plain torch anywhere."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Protocol

import torch

from engine.worker.gpu.kv_write import HeadNorms, KVWrite
from engine.worker.gpu.torch_ops import TorchOps
from engine.worker.models.moe import Experts


class FusedOps(Protocol):
    """Each call reads the tokens once. No call makes the host wait, and no shape depends on data."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [num_tokens, size], residual like x -> RMS norm of their sum times weight [size]; the sum."""

    def rope_and_write(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        write: KVWrite,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        """Apply RoPE to queries and keys, after the head norms if there are any; write keys and values to
        their pages; return the queries [num_tokens, num_heads, head_dim].

        qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        cos_sin [max_positions, head_dim]: cosines, then sines, in the dtype of qkv
        positions [num_tokens] int64
        """

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [num_tokens, 2 * inner], gate first -> silu(gate) * up [num_tokens, inner]"""

    def linear_of_row(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [1, inputs], weight [outputs, inputs] -> [1, outputs]"""

    def swiglu_of_row(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [1, inputs], weight [2 * inner, inputs], gates first -> silu(gate) * up [1, inner]"""

    def mix_experts(
        self, x: torch.Tensor, experts: Experts, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Like ``Experts.forward``, for experts that ``can_mix`` accepts."""

    def can_mix(self, experts: Experts) -> bool:
        """Whether there is a grouped GEMM for these experts."""


def uses_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on tensors of this device: on CUDA, or anywhere in its interpreter."""
    runs = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return runs and find_spec("triton") is not None


def select_ops(device: torch.device) -> FusedOps:
    """The fastest implementation that runs on this device."""
    if not uses_triton(device):
        return TorchOps()
    from engine.worker.gpu.triton_ops import TritonOps

    return TritonOps()
