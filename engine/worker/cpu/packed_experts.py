"""A layer's experts as the compiled kernels read them: packed like linears, one after the other, each gate
beside the up that it is multiplied with. Knows nothing of routers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.errors import ConfigError
from engine.worker.cpu.kernels.weights import INTERLEAVED, CompiledGemm, ExpertsAddress
from engine.worker.cpu.packed_weights import PackedWeight, Weight4, Weight8, Weight16
from engine.worker.models.moe import Experts

HIDDEN_UNIT = 2 * INTERLEAVED
"""The hidden size must be a multiple of this, and the size of an expert one of INTERLEAVED."""


class PackedExperts(nn.Module):
    """Replaces ``Experts`` in bf16."""

    gate_up: torch.Tensor
    down: torch.Tensor

    def __init__(
        self, plain: Experts, pack: Callable[[torch.Tensor], PackedWeight], gemm: CompiledGemm
    ) -> None:
        """``plain``: its weights are overwritten."""
        super().__init__()
        self._gemm = gemm
        _pair_gates_and_ups(plain.gate_up)
        self._gate_up, self._down = pack(plain.gate_up.flatten(0, 1)), pack(plain.down.flatten(0, 1))
        self._shape, self._first = plain.shape, plain.first
        self.register_buffer("gate_up", self._gate_up.numbers, persistent=False)
        self.register_buffer("down", self._down.numbers, persistent=False)

    def address(self) -> ExpertsAddress:
        """The addresses for the kernels, valid as long as this object is referenced."""
        return ExpertsAddress(
            self._gate_up.address(None),
            self._down.address(None),
            self._first,
            self._shape.num_local_experts,
            self._shape.routing.experts_per_token,
            self._shape.routing.rounded,
        )

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See ``Experts.forward``."""
        return self._gemm.mix_experts(x, experts, weights, self.address())


def packed_experts(plain: Experts, gemm: CompiledGemm) -> Experts | PackedExperts:
    """Return a packed replacement, or ``plain`` itself if its sizes are not supported."""
    if not fits_kernels(plain):
        return plain
    return PackedExperts(plain, lambda weight: Weight16(weight, gemm), gemm)


def quantized_experts(
    plain: Experts, pack: type[Weight8 | Weight4], gemm: CompiledGemm | None
) -> PackedExperts:
    """Quantize experts that ``check_quantizable`` has passed."""
    assert gemm is not None
    return PackedExperts(plain, pack, gemm)


def check_quantizable(plain: Experts, gemm: CompiledGemm | None) -> None:
    """Raise ConfigError if there are no kernels for quantized experts of these sizes."""
    if gemm is None:
        raise ConfigError(
            "quantization of a mixture of experts needs the compiled kernels, which are for bfloat16 and "
            "CPUs with AVX512_BF16."
        )
    if not fits_kernels(plain):
        _, hidden_size, expert_size = plain.down.shape
        raise ConfigError(
            f"quantization of a mixture of experts needs a hidden size that is a multiple of {HIDDEN_UNIT} "
            f"and an expert size that is one of {INTERLEAVED}; the model's are {hidden_size} and "
            f"{expert_size}."
        )


def fits_kernels(plain: Experts) -> bool:
    """Whether the kernels support the experts' sizes."""
    _, hidden_size, expert_size = plain.down.shape
    return hidden_size % HIDDEN_UNIT == 0 and expert_size % INTERLEAVED == 0


def _pair_gates_and_ups(gate_up: torch.Tensor) -> None:
    """Reorder each expert's rows in place: INTERLEAVED gates, their ups, the next gates, and so on."""
    for expert in gate_up:
        paired = expert.view(2, -1, INTERLEAVED, expert.shape[1]).transpose(0, 1)
        expert.copy_(paired.flatten(0, 2).clone())
