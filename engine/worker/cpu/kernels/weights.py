"""Packs weights for the compiled GEMM, passes their addresses to it, and calls it."""

from __future__ import annotations

import ctypes

import torch

from engine.worker.cpu.kernels.library import KernelUnavailable, load_library, typed
from engine.worker.memory import empty_pages

INTERLEAVED = 32
"""Outputs of a weight that one block interleaves."""
_TILE_ROWS = 16
"""The GEMM needs a multiple of this many rows."""


class WeightAddress(ctypes.Structure):
    """A packed weight [num_outputs, 2 * num_words] in bf16 (``gemm.h``), or int8, int4 or e2m1
    (``quantized.h``). A word is a 32-bit lane: a pair of bf16 inputs of one output."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_words", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("is_float", ctypes.c_int64),
    )


class ExpertsAddress(ctypes.Structure):
    """A rank's packed experts of a layer, from number ``first`` on (``experts.h``)."""

    _fields_ = (
        ("gate_up", WeightAddress),
        ("down", WeightAddress),
        ("first", ctypes.c_int64),
        ("num_experts", ctypes.c_int64),
        ("per_token", ctypes.c_int64),
        ("rounded", ctypes.c_int64),
        ("alpha", ctypes.c_double),
        ("limit", ctypes.c_double),
        ("by_gelu", ctypes.c_int64),
    )


class CompiledGemm:
    """The GEMMs of bf16 rows with packed weights, given by their addresses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address = ctypes.c_void_p
        number = ctypes.c_int64
        self._multiply = typed(
            library.continuum_multiply, ctypes.POINTER(WeightAddress), address, number, address, number
        )
        self._interleave = typed(library.continuum_interleave, address, number, number, address, number)
        experts = ctypes.POINTER(ExpertsAddress)
        self._mix_experts = typed(
            library.continuum_mix_experts, experts, address, number, address, address, address, number
        )

    @classmethod
    def load(cls, head_dim: int) -> CompiledGemm:
        """Load the GEMM from the library for this head size. Raises KernelUnavailable if there is no
        compiler, or the CPU lacks AVX512_BF16."""
        library = load_library(head_dim, torch.bfloat16)
        if not hasattr(library, "continuum_multiply"):
            raise KernelUnavailable("this CPU has no bf16 dot-product instruction")
        return cls(library)

    def interleave(self, weight: torch.Tensor) -> torch.Tensor:
        """Pack weight [outputs, inputs], bf16, inputs a multiple of 32, as [blocks, inputs / 2, INTERLEAVED,
        2]: a pair of inputs of each output in turn. The last block is padded with zeros."""
        num_outputs, num_inputs = weight.shape
        blocks = -(-num_outputs // INTERLEAVED)
        words = empty_pages((blocks, num_inputs // 2, INTERLEAVED, 2), weight.dtype)
        rows = weight.contiguous()
        num_threads = torch.get_num_threads()
        self._interleave(rows.data_ptr(), num_outputs, num_inputs // 2, words.data_ptr(), num_threads)
        return words

    def __call__(self, x: torch.Tensor, weight: WeightAddress) -> torch.Tensor:
        """x [n, inputs], bf16 -> [n, outputs]"""
        num_rows = len(x)
        rows = x.contiguous()
        if num_rows % _TILE_ROWS:  # the kernels read whole tiles; what is in their last rows is of no use
            rows = x.new_empty(num_rows + -num_rows % _TILE_ROWS, x.shape[1])
            rows[:num_rows] = x
        output = x.new_empty(num_rows, weight.num_outputs)
        self._multiply(weight, rows.data_ptr(), num_rows, output.data_ptr(), torch.get_num_threads())
        return output

    def mix_experts(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, address: ExpertsAddress
    ) -> torch.Tensor:
        """x [n, hidden_size], bf16; experts, int64, and weights [n, experts_per_token] -> the weighted sum of
        each row's experts [n, hidden_size]"""
        x = x.contiguous()
        experts = experts.contiguous()
        weights = weights.float().contiguous()
        output = torch.empty_like(x)
        self._mix_experts(
            address,
            x.data_ptr(),
            len(x),
            experts.data_ptr(),
            weights.data_ptr(),
            output.data_ptr(),
            torch.get_num_threads(),
        )
        return output
