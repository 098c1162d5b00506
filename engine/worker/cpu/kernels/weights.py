"""How the compiled code is told where a weight lies, how it lays one out, and its product with any number of
rows."""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from engine.worker.cpu.kernels.library import KernelUnavailable, load_library, typed
from engine.worker.memory import empty_pages

INTERLEAVED = 32
"""Outputs of a weight that lie between each other."""
_TILE_ROWS = 16
"""Rows are read in multiples of them."""


class WeightAddress(ctypes.Structure):
    """A weight [num_outputs, 2 * num_words] in 16 bits (``gemm.h``), or in 8 or 4 (``quantized.h``)."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_words", ctypes.c_int64),
        ("bits", ctypes.c_int64),
    )


class CompiledProduct:
    """Products of bf16 rows with weights that lie as a WeightAddress says."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._multiply = typed(
            library.continuum_multiply, ctypes.POINTER(WeightAddress), address, number, address, number
        )
        self._interleave = typed(library.continuum_interleave, address, number, number, address, number)

    @classmethod
    def load(cls, head_dim: int) -> CompiledProduct:
        """Out of the library for heads of that size. Raises KernelUnavailable: it takes a compiler and a CPU
        that multiplies pairs of bf16."""
        library = load_library(head_dim, torch.bfloat16)
        if not hasattr(library, "continuum_multiply"):
            raise KernelUnavailable("this CPU has no bf16 dot-product instruction")
        return cls(library)

    def interleave(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [outputs, inputs], bf16, inputs a multiple of 32 -> [blocks, inputs / 2, INTERLEAVED, 2]:
        pairs of inputs, of one output after the other; the last block is filled with zeros."""
        num_outputs, num_inputs = weight.shape
        blocks = -(-num_outputs // INTERLEAVED)
        words = empty_pages((blocks, num_inputs // 2, INTERLEAVED, 2), weight.dtype)
        rows, num_threads = weight.contiguous(), torch.get_num_threads()
        self._interleave(rows.data_ptr(), num_outputs, num_inputs // 2, words.data_ptr(), num_threads)
        return words

    def __call__(self, x: torch.Tensor, weight: WeightAddress) -> torch.Tensor:
        """x [n, inputs], bf16 -> [n, outputs]"""
        rows = nn.functional.pad(x, (0, 0, 0, -len(x) % _TILE_ROWS)).contiguous()
        product = x.new_empty(len(x), weight.num_outputs)
        self._multiply(weight, rows.data_ptr(), len(x), product.data_ptr(), torch.get_num_threads())
        return product
