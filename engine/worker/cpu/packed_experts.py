"""A layer's experts in the layout of the compiled kernels: packed like linears, one after another, each gate
next to the up that it is multiplied with. Knows nothing of routers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.errors import ConfigError
from engine.worker.cpu.kernels.weights import INTERLEAVED, CompiledGemm, ExpertsAddress
from engine.worker.cpu.packed_weights import PackedWeight, Weight4, Weight8, Weight16
from engine.worker.cpu.quantization import Quantized
from engine.worker.models.moe import Experts

HIDDEN_UNIT = 2 * INTERLEAVED
"""The hidden size must be a multiple of this, and the size of an expert a multiple of INTERLEAVED."""


class PackedExperts(nn.Module):
    """Replaces ``Experts`` in bf16."""

    gate_up: torch.Tensor
    down: torch.Tensor

    def __init__(self, plain: Experts, gate_up: PackedWeight, down: PackedWeight, gemm: CompiledGemm) -> None:
        """``gate_up``: with each expert's rows in the order of ``_paired``."""
        super().__init__()
        self._gemm = gemm
        self._gate_up = gate_up
        self._down = down
        self._shape = plain.shape
        self._first = plain.first
        bias = plain.gate_up_bias
        in_turn = plain.shape.clamped is not None
        self._gate_up_bias = None if bias is None else _paired(bias, in_turn=in_turn).contiguous()
        self._down_bias = plain.added_bias
        self.register_buffer("gate_up", self._gate_up.numbers, persistent=False)
        self.register_buffer("down", self._down.numbers, persistent=False)

    def address(self) -> ExpertsAddress:
        """The addresses for the kernels, valid as long as this object is referenced."""
        clamped = self._shape.clamped
        return ExpertsAddress(
            self._gate_up.address(self._gate_up_bias),
            self._down.address(self._down_bias),
            self._first,
            self._shape.num_local_experts,
            self._shape.routing.experts_per_token,
            self._shape.routing.rounded,
            0.0 if clamped is None else clamped.alpha,
            0.0 if clamped is None else clamped.limit,
            self._shape.by_gelu,
        )

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See ``Experts.forward``."""
        return self._gemm.mix_experts(x, experts, weights, self.address())


def packed_experts(plain: Experts, gemm: CompiledGemm) -> Experts | PackedExperts:
    """Return a packed replacement, or ``plain`` itself if its sizes are not supported."""
    if not fits_kernels(plain):
        return plain
    return _packed(plain, lambda weight: Weight16(weight, gemm), gemm)


def quantized_experts(
    plain: Experts, pack: type[Weight8 | Weight4], gemm: CompiledGemm | None
) -> PackedExperts:
    """Quantize experts that have passed ``check_quantizable``."""
    assert gemm is not None
    return _packed(plain, pack, gemm)


def kept_experts(
    plain: Experts, gate_up: Quantized, down: Quantized, bits: int, gemm: CompiledGemm
) -> PackedExperts:
    """Experts over weights that are already quantized, each weight with the rows of all experts one after
    another. Their sizes must pass ``fits_kernels``."""
    pack = Weight4 if bits == 4 else Weight8
    rows = torch.arange(len(gate_up.numbers)).view(len(plain.gate_up), -1)
    order = _paired(rows, in_turn=plain.shape.clamped is not None).flatten()
    return PackedExperts(plain, pack(gate_up.in_order(order)), pack(down), gemm)


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


def _packed(
    plain: Experts, pack: Callable[[torch.Tensor], PackedWeight], gemm: CompiledGemm
) -> PackedExperts:
    """Pack the weights of ``plain``, which this overwrites."""
    for expert in plain.gate_up:
        expert.copy_(_paired(expert[None], in_turn=plain.shape.clamped is not None)[0].clone())
    return PackedExperts(plain, pack(plain.gate_up.flatten(0, 1)), pack(plain.down.flatten(0, 1)), gemm)


def _paired(gate_up: torch.Tensor, *, in_turn: bool) -> torch.Tensor:
    """gate_up [experts, 2 * size, ...]: each expert's gates, then its ups, or alternating if ``in_turn`` ->
    the same with INTERLEAVED gates, their ups, the next gates, and so on"""
    num_experts, *inputs = len(gate_up), *gate_up.shape[2:]
    if in_turn:
        return gate_up.view(num_experts, -1, INTERLEAVED, 2, *inputs).transpose(2, 3).flatten(1, 3)
    return gate_up.view(num_experts, 2, -1, INTERLEAVED, *inputs).transpose(1, 2).flatten(1, 3)
