"""Chooses the modules that replace a decoder's after its weights are loaded: packed for a CPU's kernels, or
quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from engine.errors import ConfigError
from engine.worker.cpu.onednn_linear import can_pack, packed_embedding, packed_linear
from engine.worker.cpu.packed_experts import check_quantizable, packed_experts, quantized_experts
from engine.worker.cpu.packed_weights import (
    Weight4,
    Weight8,
    compiled_gemm,
    interleaved_embedding,
    interleaved_linear,
)
from engine.worker.cpu.quantized_linear import int4_linear, int8_embedding, int8_linear
from engine.worker.models.linears import Embedding
from engine.worker.models.moe import Experts, SquaredExperts


@dataclass(frozen=True, slots=True)
class Replacements:
    """The functions that replace loaded modules by packed or quantized ones."""

    linear: Callable[[nn.Linear], nn.Module]
    experts: Callable[[Experts], nn.Module]
    check_experts: Callable[[Experts], None]
    """Raises ConfigError for experts that cannot be replaced so."""
    head: Callable[[nn.Linear], nn.Module]
    table: Callable[[Embedding], nn.Module]


def choose_replacements(
    model: nn.Module, head_dim: int, like: torch.Tensor, quantization: str | None, may_compile: bool
) -> Replacements:
    """The replacements for a decoder whose parameters have the device and dtype of ``like``.

    The LM head, whose quantization affects tokens most, gets at least 8 bits.
    """
    device = like.device
    dtype = like.dtype
    compiled = compiled_gemm(head_dim, device, dtype) if may_compile else None
    if quantization is not None:
        quantized = int4_linear if quantization == "int4" else int8_linear
        for module in model.modules():
            if isinstance(module, SquaredExperts):
                raise ConfigError("quantization is not supported for experts without gates, as Nemotron's.")
            if isinstance(module, Experts):
                check_quantizable(module, compiled)
        pack = Weight4 if quantization == "int4" else Weight8
        return Replacements(
            partial(quantized, gemm=compiled),
            lambda plain: quantized_experts(plain, pack, compiled),
            partial(check_quantizable, gemm=compiled),
            partial(int8_linear, gemm=compiled),
            partial(int8_embedding, gemm=compiled),
        )
    if compiled is not None:
        interleaved = partial(interleaved_linear, gemm=compiled)
        return Replacements(
            interleaved,
            partial(packed_experts, gemm=compiled),
            _any_experts,
            interleaved,
            partial(interleaved_embedding, gemm=compiled),
        )
    if can_pack(device, dtype):
        return Replacements(packed_linear, _unchanged, _any_experts, packed_linear, packed_embedding)
    return Replacements(_unchanged, _unchanged, _any_experts, _unchanged, _unchanged)


def _any_experts(experts: Experts) -> None:
    """No experts are refused."""


def _unchanged(module: nn.Module) -> nn.Module:
    return module
